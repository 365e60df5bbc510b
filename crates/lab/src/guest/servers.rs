//! In the guest: Redis, alone or under a Strata of the guest's own, and programs
//! that only have to do something and end.

use super::{
    boot, paced,
    words::{Drive, Served},
};
use crate::{
    random::mix,
    records::Records,
    redis::{
        expect::Expect,
        load::{Client, Pass},
        resp::{Connection, Endpoint},
    },
};
use anyhow::{Context, Result, bail};
use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};
use strata_api::ENV_CONTROL_SOCKET;

/// Starting takes longer under emulation.
const PATIENCE: Duration = Duration::from_secs(120);
/// Where the host put Strata's programs.
const PROGRAMS: &str = "/strata";
const SOCKETS: &str = "/run/strata";
/// Whom `strata` asks in the guest.
pub(super) const CONTROL: &str = "/run/strata/control.sock";
const CONFIGURATION: &str = "/run/stratad.toml";

/// Runs a program to its end; what it printed. Its complaint becomes the error.
pub(super) fn tool(program: &str, arguments: &[&str]) -> Result<String> {
    let output = Command::new(program)
        .args(arguments)
        .env("PATH", PATH)
        .env(ENV_CONTROL_SOCKET, CONTROL)
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("start {program}"))?;
    if !output.status.success() {
        // Some complain on standard output.
        let said = [&output.stderr, &output.stdout].map(|text| String::from_utf8_lossy(text));
        bail!("{program}: {}", said.concat().trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

pub(super) const PATH: &str = "/strata:/usr/sbin:/usr/bin:/sbin:/bin";

/// Starts Strata with its file tier on the NVDIMM, and these lines in its configuration.
pub(super) fn strata(lines: &str) -> Result<Child> {
    let tier = boot::pmem()?.join("tier");
    for directory in [Path::new(SOCKETS), &tier] {
        fs::create_dir_all(directory).with_context(|| format!("make {}", directory.display()))?;
    }
    let text = format!(
        "socket_dir = {SOCKETS:?}\nsnapshot_dir = \"/run/snapshots\"\ntier_path = {tier:?}\n\
         tier_order = [\"file\", \"compressed\"]\n{lines}"
    );
    fs::write(CONFIGURATION, text).context("write stratad's configuration")?;
    let log = File::create("/run/stratad.log").context("make stratad's log")?;
    let mut daemon = Command::new(format!("{PROGRAMS}/stratad"))
        .args(["--config", CONFIGURATION])
        .env("PATH", PATH)
        .stdin(Stdio::null())
        .stdout(log.try_clone().context("share stratad's log")?)
        .stderr(log)
        .spawn()
        .context("start stratad")?;
    let socket = Path::new(CONTROL);
    wait(&mut daemon, "/run/stratad.log", || {
        std::os::unix::net::UnixStream::connect(socket).is_ok()
    })?;
    Ok(daemon)
}

/// Until `ready`; an error with the last line of its log when it ends before.
pub(super) fn wait(child: &mut Child, log: &str, mut ready: impl FnMut() -> bool) -> Result<()> {
    let until = Instant::now() + PATIENCE;
    while !ready() {
        let said = || crate::subject::last_line(Path::new(log));
        if let Some(status) = child.try_wait().context("look at a server")? {
            bail!("it ended at once ({status}): {}", said());
        }
        if Instant::now() > until {
            bail!("it does not answer within {} s: {}", PATIENCE.as_secs(), said());
        }
        thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// A Redis, and what each of its records must be.
pub(super) struct Redis {
    endpoint: Endpoint,
    expect: Expect,
    child: Child,
}

impl Redis {
    /// Starts it and fills it.
    pub(super) fn start(name: &str, records: u64, under: Option<&[String]>) -> Result<Self> {
        let socket = PathBuf::from(format!("/run/{name}.sock"));
        let log = format!("/run/{name}.log");
        let mut command = match under {
            None => Command::new("redis-server"),
            Some(words) => {
                let mut command = Command::new(format!("{PROGRAMS}/strata"));
                command.args(["run", "--name", name]).args(words).args(["--", "redis-server"]);
                command
            }
        };
        let output = File::create(&log).context("make Redis's log")?;
        let mut child = command
            .args(["--port", "0", "--save", "", "--appendonly", "no", "--dir", "/run"])
            .arg("--unixsocket")
            .arg(&socket)
            .env("PATH", PATH)
            .env(ENV_CONTROL_SOCKET, CONTROL)
            .stdin(Stdio::null())
            .stdout(output.try_clone().context("share Redis's log")?)
            .stderr(output)
            .spawn()
            .context("start redis-server")?;
        let endpoint = Endpoint::Unix(socket);
        wait(&mut child, &log, || {
            Connection::open(&endpoint)
                .and_then(|mut connection| connection.call(&[b"PING"]))
                .is_ok()
        })
        .context("redis-server")?;
        let expect = Expect::new(Records::new(mix(1)), records);
        let redis = Self { endpoint, expect, child };
        redis.client().load(&redis.expect, &mut |_| ()).context("fill Redis")?;
        Ok(redis)
    }

    fn client(&self) -> Client {
        Client { endpoint: self.endpoint.clone(), connections: 2, pipeline: 16, core: None }
    }

    pub(super) fn drive(&self, load: &Drive) -> Result<Served> {
        paced::drive(&self.endpoint, &self.expect, load)
    }

    /// Every record, compared.
    pub(super) fn verify(&self) -> Result<Pass> {
        let pass = self.client().verify(&self.expect, &mut |_| ())?;
        if pass.missing_values > 0 {
            bail!("wrong values: {} records are gone", pass.missing_values);
        }
        Ok(pass)
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        // The guest is switched off next: who is left then ends all the same.
        let _ = self.child.kill().and_then(|()| self.child.wait());
    }
}
