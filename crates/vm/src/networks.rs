//! A guest's networks once more: those of one that comes back, and those of a clone. A pure
//! function of the words.
//!
//! A clone is never on a network with its first one before it is known by an address of its
//! own: a tap device that is made for it leads nowhere, until somebody puts it on a bridge.

use strata_units::order::{MAX_CARDS, Mac};

use crate::options::Options;
use crate::refusals::Refusal;

/// What becomes of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Networks<'a> {
    /// It is the first one, and comes back. `beside`: its QEMU before is there still.
    Back {
        /// Whether two QEMUs have them for a moment.
        beside: bool,
    },
    /// They are a clone's own.
    Clone(CloneNetworks<'a>),
}

/// A clone's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CloneNetworks<'a> {
    /// Random, and no other clone's: its addresses and its devices' names are made of it.
    pub id: [u8; 4],
    /// Which they are.
    pub wish: NetworkWish<'a>,
}

/// Which networks a clone has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NetworkWish<'a> {
    /// Of the kind that the first one has.
    SameKind,
    /// User networking, with these ports of 127.0.0.1 that lead to ports of the first of them.
    User(&'a [(u16, u16)]),
    /// A tap device each, to be put on a bridge.
    Tap,
}

/// Options of a card that `-nic` has beside those of the network.
const OF_CARD: [&str; 6] = ["id", "model", "mac", "name", "addr", "vectors"];
/// Options of a tap device that say which it is, or who opens it.
const WHICH_TAP: [&str; 6] = ["br", "helper", "ifname", "script", "downscript", "type"];
/// Those by which whoever starts QEMU hands it over.
const HANDED_OVER: [&str; 4] = ["fd", "fds", "vhostfd", "vhostfds"];
/// Those of user networking that lead out of the guest to what is the first one's.
const FIRST_ONES: [&str; 4] = ["hostfwd", "guestfwd", "smb", "smbserver"];

impl CloneNetworks<'_> {
    /// The address of a card.
    #[must_use]
    pub fn mac(&self, card: usize) -> Mac {
        Mac::of_clone(self.id, card as u8)
    }

    /// All addresses that its cards may have.
    #[must_use]
    pub fn macs(&self) -> Vec<Mac> {
        (0..MAX_CARDS).map(|card| self.mac(card)).collect()
    }

    /// What a tap device of its is called: short enough for the kernel.
    #[must_use]
    pub fn tap(&self, number: usize) -> String {
        let [a, b, c, d] = self.id;
        format!("st{a:02x}{b:02x}{c:02x}{d:02x}-{number}")
    }
}

/// The words for user networking that no card is on. Its state is in the snapshot of a guest
/// that has it, and QEMU insists on somebody to give that to: a clone that has other networks
/// has these, too.
pub(crate) fn apart(count: usize) -> Vec<String> {
    let words =
        |number| ["-netdev".to_owned(), format!("user,id=strata-apart-{number},restrict=on")];
    (0..count).flat_map(words).collect()
}

/// The networks of a command line, one after the other.
pub(crate) struct Walk<'a> {
    networks: Networks<'a>,
    cards: usize,
    /// User networks that became others.
    pub(crate) replaced: usize,
    /// Names of tap devices that are a clone's.
    pub(crate) taps: Vec<String>,
    pub(crate) notes: Vec<String>,
    forwarded: bool,
}

impl<'a> Walk<'a> {
    pub(crate) fn new(networks: Networks<'a>) -> Self {
        Self {
            networks,
            cards: 0,
            replaced: 0,
            taps: Vec::new(),
            notes: Vec::new(),
            forwarded: false,
        }
    }

    /// Gives a clone's card its address, under that key; false: nothing is changed. What runs
    /// in the guest has the address of before, until it is told; a guest that is started anew
    /// has this one.
    pub(crate) fn card(&mut self, options: &mut Options, key: &str) -> bool {
        let Networks::Clone(clone) = self.networks else { return false };
        let card = self.cards;
        self.cards += 1;
        if card < MAX_CARDS {
            options.set(key, &clone.mac(card).to_string());
        }
        card < MAX_CARDS
    }

    /// The value of `-netdev`, `-nic` or `-net`.
    pub(crate) fn network(&mut self, option: &str, value: &str) -> Result<String, Refusal> {
        let mut options = Options::parse(value, "type")?;
        let kind = options.get("type").unwrap_or_default();
        match (option, kind.as_str()) {
            ("net", "nic") => drop(self.card(&mut options, "macaddr")),
            ("nic", "none") | (_, "none") => {}
            (_, "user" | "tap" | "bridge") => {
                if option == "nic" {
                    self.card(&mut options, "mac");
                }
                return match kind.as_str() {
                    "user" => self.user(options),
                    _ => self.tap(&kind, options),
                };
            }
            _ => {
                return Err(Refusal::new(
                    format!("two guests cannot have the network of -{option} {kind}"),
                    "give the guest user networking (-nic user), a tap device, or none",
                ));
            }
        }
        Ok(options.to_string())
    }

    fn user(&mut self, mut options: Options) -> Result<String, Refusal> {
        if let Networks::Clone(CloneNetworks { wish: NetworkWish::Tap, .. }) = self.networks {
            let mut tap = Options::parse("tap", "type")?;
            for key in OF_CARD {
                if let Some(value) = options.get(key) {
                    tap.set(key, &value);
                }
            }
            self.make_tap(&mut tap);
            self.replaced += 1;
            // What the guest's driver was promised by user networking is what it can have.
            tap.set("vnet_hdr", "off");
            return Ok(tap.to_string());
        }
        for key in FIRST_ONES {
            if options.remove(key) {
                self.notes.push(format!("its network has no {key}, which is the first guest's"));
            }
        }
        let mut text = options.to_string();
        if let Networks::Clone(CloneNetworks { wish: NetworkWish::User(forwards), .. }) =
            self.networks
            && !std::mem::replace(&mut self.forwarded, true)
        {
            for (host, guest) in forwards {
                text += &format!(",hostfwd=tcp:127.0.0.1:{host}-:{guest}");
            }
        }
        Ok(text)
    }

    fn tap(&mut self, kind: &str, mut options: Options) -> Result<String, Refusal> {
        if let Some(key) = HANDED_OVER.iter().find(|key| options.get(key).is_some()) {
            return Err(Refusal::new(
                format!("its tap device is handed over by whoever starts it ({key})"),
                "name the tap device (ifname=)",
            ));
        }
        if options.get("vhost").is_some() && options.is_on("vhost") {
            return Err(Refusal::new(
                "the kernel works on its network (vhost=on)",
                "leave vhost=on out",
            ));
        }
        match self.networks {
            Networks::Back { beside: true } => match options.get("ifname") {
                None => Ok(options.to_string()),
                Some(name) => Err(Refusal::new(
                    format!("its QEMU before has the tap device {name}"),
                    "end the guest, and restore the snapshot; or leave ifname= out",
                )),
            },
            Networks::Back { beside: false } => Ok(options.to_string()),
            Networks::Clone(CloneNetworks { wish: NetworkWish::User(_), .. }) => Err(Refusal::new(
                format!(
                    "its network is of the kind {kind}, whose ways its driver uses: user networking lacks them"
                ),
                "clone it with --net bridge=NAME, or without --net",
            )),
            Networks::Clone(clone) => {
                for key in WHICH_TAP {
                    options.remove(key);
                }
                let rest = options.to_string();
                let mut tap = Options::parse(&format!("tap,{rest}"), "type")?;
                let name = self.make_tap(&mut tap);
                if clone.wish == NetworkWish::SameKind {
                    self.notes.push(format!(
                        "its network is the tap device {name}, which leads nowhere; --net bridge=NAME puts a clone on a bridge"
                    ));
                }
                Ok(tap.to_string())
            }
        }
    }

    /// Has `tap` be a device of this clone's, which QEMU makes and nobody else has.
    fn make_tap(&mut self, tap: &mut Options) -> String {
        let Networks::Clone(clone) = self.networks else { unreachable!("a clone's") };
        let name = clone.tap(self.taps.len());
        for (key, value) in [("ifname", &*name), ("script", "no"), ("downscript", "no")] {
            tap.set(key, value);
        }
        self.taps.push(name.clone());
        name
    }

    /// Whether all that was wished is there.
    pub(crate) fn check(&self) -> Result<(), Refusal> {
        let Networks::Clone(clone) = self.networks else { return Ok(()) };
        let is_lacking = match clone.wish {
            NetworkWish::SameKind => false,
            NetworkWish::User(forwards) => !forwards.is_empty() && !self.forwarded,
            NetworkWish::Tap => self.taps.is_empty(),
        };
        match is_lacking {
            false => Ok(()),
            true => Err(Refusal::new(
                "its command line names no network",
                "start guests with a network of their own (-nic user) to clone them so",
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: [u8; 4] = [0xab, 1, 2, 0xff];

    fn network(networks: Networks<'_>, option: &str, value: &str) -> Result<String, String> {
        let mut walk = Walk::new(networks);
        let found = walk.network(option, value).map_err(|refusal| refusal.why)?;
        walk.check().map_err(|refusal| refusal.why)?;
        Ok(found)
    }

    fn clone(wish: NetworkWish<'_>) -> Networks<'_> {
        Networks::Clone(CloneNetworks { id: ID, wish })
    }

    #[test]
    fn what_comes_back_has_what_it_had() {
        for beside in [true, false] {
            let back = |option, value| network(Networks::Back { beside }, option, value);
            let user = back("nic", "user,hostfwd=tcp::22-:22,model=e1000");
            assert_eq!(user.as_deref(), Ok("type=user,model=e1000"));
            assert_eq!(back("netdev", "bridge,id=n,br=b").as_deref(), Ok("type=bridge,id=n,br=b"));
            let tap = back("netdev", "tap,id=n,ifname=t0,script=no");
            assert_eq!(tap.is_ok(), !beside, "{tap:?}");
            for (value, why) in [
                ("tap,id=n,fd=3", "(fd)"),
                ("tap,id=n,vhost=on", "vhost"),
                ("socket,id=n", "socket"),
            ] {
                let refused = back("netdev", value).expect_err(value);
                assert!(refused.contains(why), "{refused}");
            }
        }
    }

    #[test]
    fn a_clone_has_networks_and_addresses_of_its_own() {
        let same = clone(NetworkWish::SameKind);
        let mac = "02:ab:01:02:ff:00";
        let found = network(same, "nic", "user,model=virtio,hostfwd=tcp::22-:22");
        assert_eq!(found, Ok(format!("type=user,model=virtio,mac={mac}")));
        let found = network(same, "net", "nic,macaddr=52:54:00:12:34:56");
        assert_eq!(found, Ok(format!("type=nic,macaddr={mac}")));
        for given in ["tap,id=n,ifname=t0,script=/x", "bridge,id=n,br=br0,helper=/y"] {
            let found = network(same, "netdev", given);
            let expected = "type=tap,id=n,ifname=stab0102ff-0,script=no,downscript=no";
            assert_eq!(found.as_deref(), Ok(expected));
        }
        assert!(CloneNetworks { id: ID, wish: NetworkWish::Tap }.tap(7).len() < 16);
    }

    #[test]
    fn a_clone_has_the_network_that_is_wished() {
        let user = clone(NetworkWish::User(&[(7001, 22), (7100, 80)]));
        let found = network(user, "netdev", "user,id=n,hostfwd=tcp::22-:22");
        let expected =
            "type=user,id=n,hostfwd=tcp:127.0.0.1:7001-:22,hostfwd=tcp:127.0.0.1:7100-:80";
        assert_eq!(found.as_deref(), Ok(expected));
        assert!(network(user, "netdev", "tap,id=n").expect_err("none").contains("kind tap"));
        assert!(network(user, "nic", "none").expect_err("none").contains("names no network"));
        let tap = clone(NetworkWish::Tap);
        let found = network(tap, "netdev", "user,id=n,net=10.0.0.0/8,hostfwd=tcp::22-:22");
        let expected = "type=tap,id=n,ifname=stab0102ff-0,script=no,downscript=no,vnet_hdr=off";
        assert_eq!(found.as_deref(), Ok(expected));
        // The forwards are the first network's, and each tap has a name of its own.
        let mut walk = Walk::new(user);
        assert!(walk.network("netdev", "user,id=a").expect("one").contains("hostfwd"));
        assert!(!walk.network("netdev", "user,id=b").expect("two").contains("hostfwd"));
        let mut walk = Walk::new(tap);
        for id in ["a", "b"] {
            walk.network("netdev", &format!("user,id={id}")).expect("one");
        }
        assert_eq!(walk.taps, ["stab0102ff-0", "stab0102ff-1"]);
        let apart = apart(walk.replaced).join(" ");
        assert!(apart.starts_with("-netdev user,id=strata-apart-0,"), "{apart}");
        assert!(apart.ends_with("-netdev user,id=strata-apart-1,restrict=on"), "{apart}");
    }
}
