//! The first process of a guest: boots it, does what the host says over the second
//! serial line, and says what came of it.

use super::{
    boot,
    database::Mariadb,
    servers::{self, Redis},
    words::{Drive, Order, Reply, Served},
};
use anyhow::{Context, Result, bail};
use rustix::{
    system::{RebootCommand, reboot},
    termios::{OptionalActions, tcgetattr, tcsetattr},
};
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    fs::File,
    io::{BufRead, BufReader, Write},
    process::{Child, Command},
    thread,
};

/// Where the host listens; the first line is the console.
const LINE: &str = "/dev/ttyS1";
const CONSOLE: &str = "/dev/ttyS0";

/// Boots, obeys, and switches the machine off.
pub(crate) fn run() -> Result<()> {
    if std::process::id() != 1 {
        bail!("this is the first process of a guest, and nothing else");
    }
    let ended = serve();
    if let Err(error) = &ended {
        eprintln!("guest: {error:#}");
    }
    rustix::fs::sync();
    reboot(RebootCommand::PowerOff).context("switch the guest off")
}

fn serve() -> Result<()> {
    boot::up()?;
    let line = File::options().read(true).write(true).open(LINE).context("open the line")?;
    let mut raw = tcgetattr(&line).context("look at the line")?;
    raw.make_raw();
    tcsetattr(&line, OptionalActions::Now, &raw).context("make the line raw")?;
    let mut answers = line.try_clone().context("share the line")?;
    say(&mut answers, &Reply::Up);
    let mut guest = Guest::default();
    for order in BufReader::new(line).lines() {
        let order = order.context("hear the host")?;
        let done = serde_json::from_str(&order)
            .with_context(|| format!("understand {order:?}"))
            .and_then(|order| guest.obey(order));
        let reply = match done {
            Ok(value) => Reply::Done(value),
            Err(error) => Reply::Failed(format!("{error:#}")),
        };
        say(&mut answers, &reply);
        if guest.is_over {
            break;
        }
    }
    Ok(())
}

fn say(line: &mut File, reply: &Reply) {
    let text = serde_json::to_string(reply).expect("a reply can be said");
    if let Err(error) = writeln!(line, "{text}") {
        eprintln!("guest: answer the host: {error}");
    }
}

/// What has been started.
#[derive(Default)]
struct Guest {
    redis: BTreeMap<String, Redis>,
    mariadb: Option<Mariadb>,
    strata: Option<Child>,
    is_over: bool,
}

impl Guest {
    fn obey(&mut self, order: Order) -> Result<Value> {
        match order {
            Order::Strata { lines } => {
                self.strata = Some(servers::strata(&lines)?);
                Ok(Value::Null)
            }
            Order::Redis { name, records, under } => {
                let redis = Redis::start(&name, records, under.as_deref())?;
                self.redis.insert(name, redis);
                Ok(Value::Null)
            }
            Order::Drive(load) => Ok(json!(self.of(&load.name)?.drive(&load)?)),
            Order::DriveAll { loads } => Ok(json!(self.drive_all(&loads)?)),
            Order::Verify { name } => Ok(json!(self.of(&name)?.verify()?)),
            Order::Mariadb { pool_mebibytes } => {
                self.mariadb = Some(Mariadb::start(pool_mebibytes)?);
                Ok(Value::Null)
            }
            Order::Sysbench(load) => Ok(json!(self.mariadb()?.sysbench(&load)?)),
            Order::Rows { database } => {
                self.mariadb()?.verify(&database)?;
                Ok(Value::Null)
            }
            Order::Run { line } => Ok(json!(servers::tool("bash", &["-c", &line])?)),
            Order::Shell { text } => {
                shell(&text)?;
                Ok(Value::Null)
            }
            Order::End => {
                self.redis.clear();
                self.mariadb = None;
                if let Some(mut daemon) = self.strata.take() {
                    daemon.kill().and_then(|()| daemon.wait()).context("end stratad")?;
                }
                self.is_over = true;
                Ok(Value::Null)
            }
        }
    }

    fn drive_all(&self, loads: &[Drive]) -> Result<Vec<Served>> {
        thread::scope(|scope| {
            let all: Vec<_> = loads
                .iter()
                .map(|load| scope.spawn(move || self.of(&load.name)?.drive(load)))
                .collect();
            all.into_iter().map(|one| one.join().expect("it did not panic")).collect()
        })
    }

    fn of(&self, name: &str) -> Result<&Redis> {
        self.redis.get(name).with_context(|| format!("no Redis is called {name}"))
    }

    fn mariadb(&self) -> Result<&Mariadb> {
        self.mariadb.as_ref().context("MariaDB has not been started")
    }
}

/// A shell for whoever sits at the console.
fn shell(text: &str) -> Result<()> {
    let mut console = File::options().write(true).open(CONSOLE).context("open the console")?;
    console.write_all(text.as_bytes()).context("write to the console")?;
    let terminal = || File::options().read(true).write(true).open(CONSOLE);
    Command::new("setsid")
        .args(["--ctty", "--wait", "bash", "--norc"])
        .env("PATH", servers::PATH)
        .env("HOME", "/root")
        .env("TERM", "vt100")
        .env("PS1", "guest# ")
        .env(strata_api::ENV_CONTROL_SOCKET, servers::CONTROL)
        .stdin(terminal().context("open the console")?)
        .stdout(terminal().context("open the console")?)
        .stderr(terminal().context("open the console")?)
        .status()
        .context("start a shell")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elsewhere_it_refuses_to_run() {
        assert!(run().is_err());
    }
}
