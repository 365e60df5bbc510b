//! A clone of a guest is a machine of its own: its network, and, by the agent in it, its host
//! name and addresses. What a clone keeps of the first one is always said.
//!
//! A clone's tap device is put on a bridge when its agent has said that the guest has the
//! address that it was told: before that, two machines of one address would be there.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use strata_api::{Identified, Identity, PortForward, Reply, Request};
use strata_units::order::host_name_of;
use strata_vm::{CloneNetworks, NetworkWish};

use crate::args::{NetArgument, NetworkArguments};
use crate::client::ask_watching;
use crate::failure::{Failure, Result, printable};
use crate::{place, run};

/// Where administrators' programs are, which not everybody's PATH has.
const ADMINISTRATORS: &str = "/usr/sbin:/sbin";
/// Clones that are told at one time.
const AT_ONCE: usize = 16;

/// The network of a guest's clones.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum GuestNet {
    /// Of the kind that the first one has.
    Kind,
    /// User networking, with ports that lead to it.
    New(Vec<PortForward>),
    /// A bridge of this machine's.
    Bridge {
        bridge: String,
        /// `ip`, which puts devices there.
        program: PathBuf,
    },
}

impl GuestNet {
    /// What is typed, if it can be had here.
    pub(crate) fn wished(arguments: &NetworkArguments, what: &str) -> Result<Self> {
        Ok(match &arguments.net {
            None | Some(NetArgument::Shared) => Self::Kind,
            Some(NetArgument::New) => Self::New(arguments.forward.clone()),
            Some(NetArgument::Bridge(bridge)) => {
                let path = std::env::var_os("PATH").unwrap_or_default();
                let program = place::in_path("ip", &path)
                    .or_else(|| place::in_path("ip", ADMINISTRATORS.as_ref()));
                let program = program.ok_or_else(|| {
                    Failure::new(what, "ip is not there").todo("install iproute2")
                })?;
                // Not by /sys: that may show another network than ours.
                let found = ip(&program, &["-o", "link", "show", "dev", bridge, "type", "bridge"]);
                if !found.is_ok_and(|printed| !printed.is_empty()) {
                    let why = format!("there is no bridge here that is called {bridge}");
                    return Err(Failure::new(what, why)
                        .todo(format!("make it: ip link add {bridge} type bridge")));
                }
                Self::Bridge { bridge: bridge.clone(), program }
            }
        })
    }
}

/// What is a clone's own.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Own {
    id: [u8; 4],
    /// Ports here, and those of the clone that they lead to.
    ports: Vec<(u16, u16)>,
    taps: Vec<String>,
}

impl Own {
    /// Of the clone with that number, from 1.
    pub(crate) fn new(net: &GuestNet, number: u32, what: &str) -> Result<Self> {
        let failed = |why: &dyn std::fmt::Display| Failure::new(what, why.to_string());
        let random = fs::read_to_string("/proc/sys/kernel/random/uuid");
        let random = random.map_err(|error| failed(&error))?;
        let id = random.get(..8).and_then(|digits| u32::from_str_radix(digits, 16).ok());
        let id = id.ok_or_else(|| failed(&"the kernel has no random numbers"))?.to_be_bytes();
        let mut ports = Vec::new();
        // Those that are to be free ones are held until all are chosen.
        let mut held = Vec::new();
        if let GuestNet::New(forwards) = net {
            for forward in forwards {
                let host = match forward.host {
                    0 => {
                        let listener = TcpListener::bind("127.0.0.1:0");
                        let listener = listener.map_err(|error| failed(&error))?;
                        let port = listener.local_addr().map_err(|error| failed(&error))?.port();
                        held.push(listener);
                        port
                    }
                    // That they do not go beyond the last port was checked.
                    host => u16::try_from(u32::from(host) + number - 1).unwrap_or(host),
                };
                ports.push((host, forward.guest));
            }
        }
        Ok(Self { id, ports, taps: Vec::new() })
    }

    pub(crate) fn networks(&self, net: &GuestNet) -> CloneNetworks<'_> {
        let wish = match net {
            GuestNet::Kind => NetworkWish::SameKind,
            GuestNet::New(_) => NetworkWish::User(&self.ports),
            GuestNet::Bridge { .. } => NetworkWish::Tap,
        };
        CloneNetworks { id: self.id, wish }
    }

    pub(crate) fn with_taps(self, taps: Vec<String>) -> Self {
        Self { taps, ..self }
    }

    pub(crate) fn forwards(&self) -> Vec<PortForward> {
        self.ports.iter().map(|&(host, guest)| PortForward { host, guest }).collect()
    }

    fn identity(&self, name: &str) -> Identity {
        let networks = CloneNetworks { id: self.id, wish: NetworkWish::SameKind };
        let macs = networks.macs().iter().map(ToString::to_string).collect();
        Identity { host_name: host_name_of(name), macs }
    }
}

/// Has clones that run be known by their own names and addresses, and says what came of it.
pub(crate) fn give(socket: &Path, clones: &[(String, Own)], net: &GuestNet, what: &str) {
    for some in clones.chunks(AT_ONCE) {
        std::thread::scope(|scope| {
            let told = some
                .iter()
                .map(|(name, own)| scope.spawn(move || give_one(socket, name, own, net, what)));
            // All of them are begun before the first is waited for.
            let told: Vec<_> = told.collect();
            for one in told {
                match one.join() {
                    Ok(Ok(line)) => eprintln!("strata: {}", printable(&line)),
                    Ok(Err(line)) => run::warn(&line),
                    Err(panic) => std::panic::resume_unwind(panic),
                }
            }
        });
    }
}

/// The line that says who one is now; or what it keeps.
fn give_one(
    socket: &Path,
    name: &str,
    own: &Own,
    net: &GuestNet,
    what: &str,
) -> std::result::Result<String, String> {
    let identity = own.identity(name);
    let identified = order(socket, name, Some(identity.clone()), what).map_err(|why| {
        let kept = format!("{name}: it keeps the first guest's host name and address: {why}");
        kept + &nowhere(own, net)
    })?;
    let answers = seen(&identity, &identified)
        .map_err(|why| format!("{name}: {why}{}", nowhere(own, net)))?;
    if let GuestNet::Bridge { bridge, program } = net {
        for tap in &own.taps {
            join(program, tap, bridge).map_err(|why| format!("{name}: {answers}; {why}"))?;
        }
    }
    // Who is on no network has nothing to ask of it.
    if own.taps.is_empty() || matches!(net, GuestNet::Bridge { .. }) {
        order(socket, name, None, what).map_err(|why| {
            format!("{name}: {answers}; it has not asked its network anew: {why}")
        })?;
    }
    let on = match net {
        GuestNet::Bridge { bridge, .. } => format!(", on the bridge {bridge}"),
        _ => String::new(),
    };
    Ok(format!("{name}: {answers}{on}"))
}

/// What becomes of taps that were to be on a bridge.
fn nowhere(own: &Own, net: &GuestNet) -> String {
    let GuestNet::Bridge { bridge, .. } = net else { return String::new() };
    let taps = own.taps.iter().map(|tap| {
        format!(
            "; its network device {tap} leads nowhere until you have given it an address of its own inside: ip link set {tap} master {bridge} up"
        )
    });
    taps.collect()
}

/// Who it is now, if it is who it is to be.
fn seen(identity: &Identity, found: &Identified) -> std::result::Result<String, String> {
    let name = found.host_name.as_deref().unwrap_or("nothing");
    let addresses = match &found.macs[..] {
        [] => "without a network card".to_owned(),
        macs => format!("with the address {}", macs.join(", ")),
    };
    let is_new = found.macs.iter().zip(&identity.macs).all(|(found, told)| found == told);
    if name == identity.host_name && is_new {
        return Ok(format!("it answers as {name}, {addresses}"));
    }
    Err(format!(
        "its hook has ended well, and it answers as {name}, {addresses}, where it was to be {} with {}",
        identity.host_name,
        identity.macs[..found.macs.len().clamp(1, identity.macs.len())].join(", ")
    ))
}

fn order(
    socket: &Path,
    name: &str,
    identity: Option<Identity>,
    what: &str,
) -> std::result::Result<Identified, String> {
    let request = Request::GuestOrder { name: name.to_owned(), identity };
    match ask_watching(socket, &request, &mut |_| {}) {
        Ok(Reply::GuestOrdered { identified }) => Ok(identified),
        Ok(Reply::Error { message, .. }) => {
            let why = message.strip_prefix(name).and_then(|rest| rest.strip_prefix(": "));
            Err(why.unwrap_or(&message).to_owned())
        }
        Ok(_) => Err("stratad answers what was not asked".to_owned()),
        Err(none) => Err(none.failure(what, socket).to_string()),
    }
}

/// Puts a tap device on a bridge.
fn join(program: &Path, tap: &str, bridge: &str) -> std::result::Result<(), String> {
    ip(program, &["link", "set", "dev", tap, "master", bridge, "up"])
        .map(drop)
        .map_err(|why| format!("its network device {tap} is not on {bridge}: {why}"))
}

/// What `ip` prints; or why it has failed.
fn ip(program: &Path, words: &[&str]) -> std::result::Result<Vec<u8>, String> {
    let output = Command::new(program)
        .args(words)
        .env_remove(run::LD_PRELOAD)
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("{}: {error}", program.display()))?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(said.lines().next().unwrap_or("ip failed").to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_clone_has_ports_and_addresses_of_its_own() {
        let forward = |host, guest| PortForward { host, guest };
        let net = GuestNet::New(vec![forward(7001, 22), forward(0, 80)]);
        let one = Own::new(&net, 1, "x").expect("made");
        let other = Own::new(&net, 3, "x").expect("made");
        assert_eq!((one.ports[0], other.ports[0]), ((7001, 22), (7003, 22)));
        assert!(one.ports[1].0 != 0 && one.ports[1].1 == 80);
        assert_ne!(one.identity("a").macs[0], other.identity("a").macs[0]);
        let identity = one.identity("a_b");
        assert_eq!((identity.host_name.as_str(), identity.macs.len()), ("a-b", 8));
        assert!(identity.macs.iter().all(|mac| mac.starts_with("02:")), "{identity:?}");
    }

    #[test]
    fn what_a_clone_is_not_is_said() {
        let identity = Own::new(&GuestNet::Kind, 1, "x").expect("made").identity("b");
        let found = |name: Option<&str>, macs: &[&str]| Identified {
            host_name: name.map(str::to_owned),
            macs: macs.iter().map(|mac| (*mac).to_owned()).collect(),
        };
        let first = identity.macs[0].as_str();
        let whole = seen(&identity, &found(Some("b"), &[first])).expect("it is");
        assert_eq!(whole, format!("it answers as b, with the address {first}"));
        assert!(seen(&identity, &found(Some("b"), &[])).is_ok());
        for wrong in [
            found(Some("a"), &[first]),
            found(None, &[first]),
            found(Some("b"), &["52:54:00:12:34:56"]),
        ] {
            let why = seen(&identity, &wrong).expect_err("it is not");
            assert!(why.contains("where it was to be b with 02:"), "{why}");
        }
        let net = GuestNet::Bridge { bridge: "br0".into(), program: "/no/ip".into() };
        let own = Own::new(&net, 1, "x").expect("made").with_taps(vec!["t0".into()]);
        assert!(nowhere(&own, &net).contains("ip link set t0 master br0 up"));
        assert!(join(Path::new("/no/ip"), "t0", "br0").expect_err("none").contains("not on br0"));
    }
}
