//! What the agent in a guest is told when the guest has become another machine, a clone: who
//! it is, and that its network is there. What it answers is the guest's word, bounded in size
//! and time, and shown; nothing else is made of it.
//!
//! The agent's port has one at its other side. For as long as an order takes, that is whoever
//! gives it, and not the balloon ([`super::balloons`]), which hears the agent before and after.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use strata_api::{Identified, Identity};
use strata_pager::Tenant;
use strata_sys::connect_now;
use strata_sys::peer::peer_of;
use strata_units::order::{Answer, MAX_CARDS, Mac, Order, State, Step, is_host_name};
use strata_units::reading::{Lines, MAX_READING_BYTES};
use strata_vm::agent_port::{PORT_ID, PORT_SOCKET_NAME, is_open};

use super::channel::{is_for_later, number};
use super::libvirts::{is_master, libvirts_port};
use super::monitor::{name_of, who_answers};
use super::{Guests, lock};

/// How often it is looked whether an agent is there: that its port is open QEMU knows of the
/// state of the device, and says it when its main loop, which answers, has run timers once.
const LOOKS: u32 = 6;
const BETWEEN_LOOKS: Duration = Duration::from_millis(40);
/// How long its port may take: the balloon lets go of it when it looks the next time.
const REACHED_WITHIN: Duration = Duration::from_secs(3);
/// How long it may take to hear what it is told.
const HEARD_WITHIN: Duration = Duration::from_secs(15);
/// How long it may take to have it done: it ends a hook sooner itself.
const DONE_WITHIN: Duration = Duration::from_secs(45);
/// What one question to the monitor may take.
const ASKED_WITHIN: Duration = Duration::from_secs(2);
/// How often an order is given that is not done yet.
const AGAIN_EVERY: Duration = Duration::from_secs(1);
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Nobody else talks to a guest's agent.
struct Ordering<'a>(&'a Guests, String);

impl Drop for Ordering<'_> {
    fn drop(&mut self) {
        lock(&self.0.ordering).remove(&self.1);
    }
}

/// A port of an agent's.
struct Port {
    path: PathBuf,
    /// What QEMU calls it.
    id: String,
    /// libvirt listens there, and has given that to QEMU.
    is_libvirts: bool,
}

impl Guests {
    /// Has the agent in a guest do what makes the guest another machine; without an
    /// `identity`, what a network that is another one needs.
    ///
    /// # Errors
    /// Why it is not done.
    pub(crate) fn order(
        &self,
        tenant: &Tenant,
        identity: Option<Identity>,
    ) -> Result<Identified, String> {
        let step = identity.map_or(Ok(Step::Network), step_of)?;
        let port = self.port(tenant)?;
        let folder = name_of(tenant);
        if !lock(&self.ordering).insert(folder.clone()) {
            return Err("somebody else tells its agent something".to_owned());
        }
        let _ordering = Ordering(self, folder);
        self.agent_is_there(tenant, &port)?;
        let stream = connected(tenant, &port)?;
        let order = Order { number: number(), step };
        let patience = Patience { heard: HEARD_WITHIN, done: DONE_WITHIN };
        carried_out(stream, &order, patience, AGAIN_EVERY)
    }

    fn port(&self, tenant: &Tenant) -> Result<Port, String> {
        let spec = self.known_spec(tenant);
        let path = self.directory(tenant).join(PORT_SOCKET_NAME);
        if path.symlink_metadata().is_ok() {
            return Ok(Port { path, id: PORT_ID.to_owned(), is_libvirts: false });
        }
        if spec.is_none_or(|spec| spec.libvirt.is_some())
            && let Some((path, id)) = libvirts_port(tenant)
        {
            return Ok(Port { path, id, is_libvirts: true });
        }
        Err("no agent answers in it: it has no port for one, as it was started without".to_owned())
    }

    /// Sees that somebody in the guest has the port open.
    fn agent_is_there(&self, tenant: &Tenant, port: &Port) -> Result<(), String> {
        for _ in 0..LOOKS {
            let asked = self.alone(tenant).and_then(|_alone| {
                let mut talk = self.talk(tenant, &self.directory(tenant), ASKED_WITHIN)?;
                is_open(&mut talk.monitor, &port.id).map_err(|error| error.to_string())
            });
            match asked {
                Ok(true) => return Ok(()),
                Ok(false) => std::thread::sleep(BETWEEN_LOOKS),
                Err(why) => return Err(format!("whether an agent is in it is not known: {why}")),
            }
        }
        Err("no agent answers in it: nobody in the guest has its port open".to_owned())
    }
}

/// What the agent is told, of what somebody asks for.
fn step_of(identity: Identity) -> Result<Step, String> {
    let Identity { host_name, macs } = identity;
    let macs: Option<Vec<Mac>> = macs.iter().map(|mac| mac.parse().ok()).collect();
    match macs {
        Some(macs) if is_host_name(&host_name) && macs.len() <= MAX_CARDS => {
            Ok(Step::Identity { host_name, macs })
        }
        _ => Err("that is no host name, or those are no addresses".to_owned()),
    }
}

/// A way to the agent: the balloon has let go of it, and QEMU listens.
fn connected(tenant: &Tenant, port: &Port) -> Result<UnixStream, String> {
    let until = Instant::now() + REACHED_WITHIN;
    loop {
        match connect_now(&port.path) {
            Ok(stream) => {
                // The kernel names who has called listen().
                if !(port.is_libvirts && peer_of(&stream).is_ok_and(is_master)) {
                    who_answers(tenant, &stream, "its agent's port")?;
                }
                stream.set_nonblocking(true).map_err(|error| error.to_string())?;
                return Ok(stream);
            }
            Err(error) if Instant::now() > until => {
                return Err(format!("its agent's port cannot be reached: {error}"));
            }
            Err(_) => std::thread::sleep(LOOK_EVERY),
        }
    }
}

#[derive(Clone, Copy)]
struct Patience {
    heard: Duration,
    done: Duration,
}

/// Gives an order until it is carried out, or nothing comes of it.
fn carried_out(
    mut stream: UnixStream,
    order: &Order,
    patience: Patience,
    again: Duration,
) -> Result<Identified, String> {
    let began = Instant::now();
    let (mut told, mut is_heard) = (None::<Instant>, false);
    let mut lines = Lines::default();
    // In front of it may be a part of a line that somebody before did not end.
    let mut line = format!("\n{order}\n").into_bytes();
    let whole = line.clone();
    line.clear();
    loop {
        let now = Instant::now();
        if line.is_empty() && told.is_none_or(|told| now >= told + again) {
            line.clone_from(&whole);
            told = Some(now);
        }
        let failed = |error: io::Error| format!("its agent's port has failed: {error}");
        match stream.write(&line) {
            Ok(count) => drop(line.drain(..count)),
            Err(error) if is_for_later(&error) => {}
            Err(error) => return Err(failed(error)),
        }
        match hear(&mut stream, &mut lines, order.number).map_err(failed)? {
            Some(State::Done { host_name, macs }) => {
                let macs = macs.iter().map(Mac::to_string).collect();
                return Ok(Identified { host_name, macs });
            }
            Some(State::Failed(why)) => return Err(format!("its agent says: {why}")),
            Some(State::Runs) => is_heard = true,
            None => {}
        }
        let waited = now.saturating_duration_since(began);
        if !is_heard && waited > patience.heard {
            let seconds = patience.heard.as_secs();
            return Err(format!(
                "no agent answers in it: who has its port open has not in {seconds} s (an agent of an earlier version does not)"
            ));
        }
        if waited > patience.done {
            let seconds = patience.done.as_secs();
            return Err(format!("its agent has begun, and not ended in {seconds} s"));
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// The last that is said of the order with that number, of a bounded piece.
fn hear(stream: &mut UnixStream, lines: &mut Lines, number: u64) -> io::Result<Option<State>> {
    let mut piece = [0; 4 * MAX_READING_BYTES];
    match stream.read(&mut piece) {
        Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
        Ok(count) => {
            let mut newest = None;
            lines.take(&piece[..count], &mut |line| {
                let answer = Answer::parse(line).filter(|answer| answer.number == number);
                if let Some(answer) = answer {
                    newest = Some(answer.state);
                }
            });
            Ok(newest)
        }
        Err(error) if is_for_later(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::thread::JoinHandle;

    use super::*;

    const SHORT: Duration = Duration::from_millis(50);
    const LONG: Duration = Duration::from_secs(20);

    /// An agent that says that for the order that it hears.
    fn agent(said: impl Fn(&Order) -> String + Send + 'static) -> (UnixStream, JoinHandle<usize>) {
        let (ours, mut its) = UnixStream::pair().expect("a pair");
        ours.set_nonblocking(true).expect("set");
        let agent = std::thread::spawn(move || {
            let mut heard = 0;
            let reader = BufReader::new(its.try_clone().expect("another"));
            for line in reader.lines().map_while(Result::ok) {
                let Some(order) = Order::parse(line.as_bytes()) else { continue };
                heard += 1;
                if its.write_all(said(&order).as_bytes()).is_err() {
                    break;
                }
            }
            heard
        });
        (ours, agent)
    }

    fn order() -> Order {
        Order { number: 7, step: Step::Network }
    }

    #[test]
    fn an_order_is_given_until_it_is_done() {
        let (ours, agent) = agent(|order| {
            let answer = |number, state| Answer { number, state };
            let other = answer(6, State::Failed("of another".into()));
            let done =
                State::Done { host_name: Some("b".into()), macs: vec![Mac([2, 0, 0, 0, 0, 1])] };
            let state = if order.number == 7 { done } else { State::Runs };
            format!("torn\n{other}\n{}\n", answer(order.number, state))
        });
        let patience = Patience { heard: LONG, done: LONG };
        let done = carried_out(ours, &order(), patience, LONG).expect("done");
        let expected =
            Identified { host_name: Some("b".into()), macs: vec!["02:00:00:00:00:01".to_owned()] };
        assert_eq!((done, agent.join().expect("ended")), (expected, 1));
    }

    #[test]
    fn who_lies_or_says_nothing_is_waited_for_no_longer_than_is_said() {
        type Says = fn(&Order) -> String;
        let nothing: Says = |_| String::new();
        let garbage: Says = |_| "x".repeat(100_000) + "\nstrata-answer/1 7 done ;;\n";
        let runs: Says =
            |order| format!("{}\n", Answer { number: order.number, state: State::Runs });
        let failed: Says = |order| {
            let state = State::Failed("ip: no such device".into());
            format!("{}\n", Answer { number: order.number, state })
        };
        for (says, heard, done, why) in [
            (nothing, SHORT, LONG, "no agent answers in it: who has its port open"),
            (garbage, SHORT, LONG, "no agent answers in it: who has its port open"),
            (runs, LONG, SHORT, "has begun, and not ended"),
            (failed, LONG, LONG, "its agent says: ip: no such device"),
        ] {
            let (ours, agent) = agent(says);
            let patience = Patience { heard, done };
            let refused = carried_out(ours, &order(), patience, SHORT / 5).expect_err(why);
            assert!(refused.contains(why), "{refused}");
            assert!(agent.join().expect("ended") > 0);
        }
        let (ours, its) = UnixStream::pair().expect("a pair");
        drop(its);
        let patience = Patience { heard: LONG, done: LONG };
        let refused = carried_out(ours, &order(), patience, LONG).expect_err("gone");
        assert!(refused.contains("has failed"), "{refused}");
    }

    #[test]
    fn nonsense_is_no_identity() {
        let identity = |host_name: &str, macs: &[&str]| {
            let macs = macs.iter().map(|mac| (*mac).to_owned()).collect();
            step_of(Identity { host_name: host_name.to_owned(), macs })
        };
        assert!(identity("b", &["02:00:00:00:00:01"]).is_ok());
        for (name, macs) in [("a b", &[][..]), ("b", &["2"]), ("b", &["02:00:00:00:00:01"; 9])] {
            assert!(identity(name, macs).is_err());
        }
    }
}
