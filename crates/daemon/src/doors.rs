//! Where commands and agents come: sockets that this daemon makes in its directory, or that
//! somebody listened at before it began. That is a service manager, which goes on listening
//! while there is no daemon, so that who comes then waits for the next one; or the stratad
//! that this one was before an upgrade.

use std::fs::{self, Permissions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::Path;

use anyhow::{Context, bail};
use strata_api::AGENT_SOCKET_NAME;
use strata_sys::peer::peer_of;
use strata_sys::{HandedSockets, Listening, SeqPacketListener, connect_now, process_exists};

use crate::config::Config;
use crate::control;

/// Both sockets.
#[derive(Debug)]
pub(crate) struct Doors {
    pub(crate) control: UnixListener,
    pub(crate) agents: SeqPacketListener,
    /// A service manager listens at them, too: their names stay when this daemon ends.
    pub(crate) are_managers: bool,
}

impl Doors {
    /// Takes what was handed over, or makes both.
    ///
    /// # Errors
    /// Another one listens there, or a manager where this daemon is not to be.
    pub(crate) fn open(
        config: &Config,
        private: bool,
        handed: HandedSockets,
    ) -> anyhow::Result<Self> {
        let are_managers = handed.are_managers;
        match Self::of_handed(config, handed) {
            Ok(Some(doors)) => Ok(doors),
            Err(error) if are_managers => Err(error),
            // Its predecessor's are in another directory than the configuration says by now.
            Ok(None) | Err(_) => Self::bind(config, private),
        }
    }

    /// None: there is nothing.
    fn of_handed(config: &Config, handed: HandedSockets) -> anyhow::Result<Option<Self>> {
        let HandedSockets { sockets, are_managers } = handed;
        if sockets.is_empty() {
            return Ok(None);
        }
        let todo = "have stratad.socket and socket_dir name the same two sockets, or disable stratad.socket";
        let (mut control, mut agents) = (None, None);
        for socket in sockets {
            let kind = Listening::at(&socket);
            let socket = UnixListener::from(socket);
            let address = socket.local_addr().context("cannot tell where a socket is")?;
            let path = address.as_pathname().unwrap_or(Path::new("no path"));
            let is = |name: &Path| is_same(path, name);
            socket.set_nonblocking(false)?;
            match kind {
                Some(Listening::Streams) if is(&config.control_socket()) => control = Some(socket),
                Some(Listening::Packets) if is(&agent_socket(config)) => {
                    agents = Some(SeqPacketListener::adopt(socket.into()));
                }
                _ => bail!(
                    "the service manager listens at {}, which is no socket of a stratad in {}: {todo}",
                    path.display(),
                    config.socket_dir.display()
                ),
            }
        }
        match (control, agents) {
            (Some(control), Some(agents)) => Ok(Some(Self { control, agents, are_managers })),
            _ => bail!("the service manager listens at one of the two sockets only: {todo}"),
        }
    }

    fn bind(config: &Config, private: bool) -> anyhow::Result<Self> {
        let (control_socket, agent_socket) = (config.control_socket(), agent_socket(config));
        let open_to_all = if private { 0o600 } else { 0o666 };
        let control = control::bind(&control_socket, open_to_all)
            .map_err(|error| cannot_listen(&control_socket, &error))?;
        // The control socket is ours alone now, so this one is left over, if there.
        let _ = fs::remove_file(&agent_socket);
        let agents = SeqPacketListener::bind(&agent_socket)
            .map_err(|error| cannot_listen(&agent_socket, &error))?;
        fs::set_permissions(&agent_socket, Permissions::from_mode(open_to_all))?;
        Ok(Self { control, agents, are_managers: false })
    }

    /// Another pair of descriptors of the same sockets.
    pub(crate) fn descriptors(&self) -> [&dyn AsFd; 2] {
        [&self.control, &self.agents]
    }

    /// Takes the names away, if they are this daemon's.
    pub(crate) fn close(self, config: &Config) {
        if !self.are_managers {
            remove_names(config);
        }
    }
}

/// Where agents come.
pub(crate) fn agent_socket(config: &Config) -> std::path::PathBuf {
    config.socket_dir.join(AGENT_SOCKET_NAME)
}

/// Takes away the names of sockets that nobody listens at for this daemon.
pub(crate) fn remove_names(config: &Config) {
    for socket in [agent_socket(config), config.control_socket()] {
        // Gone already is as good.
        let _ = fs::remove_file(socket);
    }
}

/// Whether both are the same file, by whatever way.
fn is_same(first: &Path, second: &Path) -> bool {
    let place = |path: &Path| path.parent().and_then(|parent| parent.canonicalize().ok());
    first.file_name() == second.file_name()
        && place(first).is_some_and(|it| place(second) == Some(it))
}

/// Refuses to take over the names of sockets at which a service manager listens for a stratad
/// of its own. `before`: the daemon that was here, whose sockets may be open still.
pub(crate) fn leave_to_manager(config: &Config, before: u32) -> anyhow::Result<()> {
    let socket = config.control_socket();
    // Whoever called listen(2) is named by the kernel.
    let Ok(peer) = connect_now(&socket).and_then(peer_of) else { return Ok(()) };
    let is_ours = [0, before, std::process::id()].contains(&peer.pid);
    if is_ours || !process_exists(peer.pid) {
        return Ok(());
    }
    bail!(
        "process {} listens on {} for the stratad that it starts: have it start that (systemctl start stratad), or end its listening first (systemctl stop stratad.socket)",
        peer.pid,
        socket.display()
    )
}

/// Why nobody can be listened to.
pub(crate) fn cannot_listen(socket: &Path, error: &io::Error) -> anyhow::Error {
    let todo = match error.kind() {
        io::ErrorKind::AddrInUse => "stop that one first, or name another socket_dir",
        io::ErrorKind::PermissionDenied => "run stratad as root, or name another socket_dir",
        _ => "name another socket_dir",
    };
    anyhow::anyhow!("cannot listen on {}: {error}; {todo}", socket.display())
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use super::*;
    use crate::config::Machine;

    struct Fixture {
        config: Config,
    }

    impl Fixture {
        fn new(name: &str) -> Self {
            let name = format!("strata-doors-{name}-{}", std::process::id());
            let mut config = Config::defaults(&Machine::this().expect("this machine"));
            config.socket_dir = std::env::temp_dir().join(name);
            fs::create_dir(&config.socket_dir).expect("a directory");
            Self { config }
        }

        /// What a service manager hands over: sockets of these names.
        fn handed(&self, stream: &str, packets: &str) -> HandedSockets {
            let path = |name: &str| self.config.socket_dir.join(name);
            let control = UnixListener::bind(path(stream)).expect("bound");
            control.set_nonblocking(true).expect("set");
            let agents = SeqPacketListener::bind(&path(packets)).expect("bound");
            let agents = agents.as_fd().try_clone_to_owned().expect("a copy");
            HandedSockets { sockets: vec![agents, OwnedFd::from(control)], are_managers: true }
        }
    }

    impl Drop for Fixture {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.config.socket_dir);
        }
    }

    #[test]
    fn a_managers_sockets_are_taken_and_their_names_stay() {
        let mut fixture = Fixture::new("taken");
        let handed = fixture.handed("control.sock", AGENT_SOCKET_NAME);
        // By another way to the same place.
        let own = fixture.config.socket_dir.clone();
        fixture.config.socket_dir = own.join("..").join(own.file_name().expect("a name"));
        let doors = Doors::open(&fixture.config, false, handed).expect("both");
        assert!(doors.are_managers);
        let _client = connect_now(&fixture.config.control_socket()).expect("room");
        doors.control.accept().expect("it waits for nobody who is there");
        doors.close(&fixture.config);
        assert!(fixture.config.control_socket().exists() && agent_socket(&fixture.config).exists());
        fixture.config.socket_dir = own;
    }

    #[test]
    fn a_manager_that_listens_elsewhere_is_refused() {
        let fixture = Fixture::new("elsewhere");
        let handed = fixture.handed("other.sock", AGENT_SOCKET_NAME);
        let refused = Doors::open(&fixture.config, false, handed).expect_err("elsewhere");
        assert!(refused.to_string().contains("other.sock"), "{refused}");
        let fixture = Fixture::new("half");
        let mut handed = fixture.handed("control.sock", AGENT_SOCKET_NAME);
        handed.sockets.pop();
        let refused = Doors::open(&fixture.config, false, handed).expect_err("one only");
        assert!(refused.to_string().contains("one of the two"), "{refused}");
    }

    #[test]
    fn what_is_made_here_goes_with_the_daemon() {
        let fixture = Fixture::new("made");
        let doors = Doors::open(&fixture.config, true, HandedSockets::default()).expect("made");
        let mode = fs::metadata(fixture.config.control_socket()).expect("a socket").permissions();
        assert_eq!(mode.mode() & 0o777, 0o600);
        // This process listens there, which is no other's manager.
        leave_to_manager(&fixture.config, 0).expect("its own");
        doors.close(&fixture.config);
        assert!(!fixture.config.control_socket().exists());
        leave_to_manager(&fixture.config, 0).expect("nobody listens");
    }
}
