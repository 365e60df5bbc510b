//! The port of the agent in a guest: QEMU's words for it, and whether somebody in the guest
//! has opened it.

use std::path::Path;

use serde_json::Value;
use strata_units::reading::AGENT_PORT_NAME;

use crate::line::{path_in, socket_at};
use crate::options::escaped;
use crate::qmp::{Monitor, QmpError};
use crate::refusals::Refusal;

/// The socket of the port, in the guest's directory.
pub const PORT_SOCKET_NAME: &str = "strata-memory";
/// What QEMU calls that.
pub const PORT_ID: &str = "strata-memory";
const BUS_ID: &str = "strata-serial";

/// Whether a machine of that kind has a bus for it.
pub(crate) fn can_have(machine: &str) -> bool {
    !["isapc", "none"].contains(&machine)
}

/// The words that are added for a machine of that kind.
pub(crate) fn words(machine: &str, directory: &Path) -> Result<Vec<[String; 2]>, Refusal> {
    let socket = socket_at(path_in(directory, PORT_SOCKET_NAME)?, "the socket")?;
    let bus = if machine == "microvm" { "virtio-serial-device" } else { "virtio-serial-pci" };
    let socket = escaped(&socket);
    Ok([
        ("-chardev", format!("socket,id={PORT_ID},path={socket},server=on,wait=off")),
        ("-device", format!("{bus},id={BUS_ID}")),
        (
            "-device",
            format!("virtserialport,bus={BUS_ID}.0,chardev={PORT_ID},name={AGENT_PORT_NAME}"),
        ),
    ]
    .map(|(option, value)| [option.to_owned(), value])
    .to_vec())
}

/// Whether somebody in the guest has the port open whose other side has that id
/// ([`PORT_ID`], or another of libvirt's).
///
/// # Errors
/// The monitor does not answer.
pub fn is_open(monitor: &mut Monitor, id: &str) -> Result<bool, QmpError> {
    let answer = monitor.execute("query-chardev", None)?;
    let is_it = |one: &&Value| one.get("label").and_then(Value::as_str) == Some(id);
    let found = answer.as_array().and_then(|all| all.iter().find(is_it));
    Ok(found.and_then(|one| one.get("frontend-open")).and_then(Value::as_bool) == Some(true))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::qmp::tests::answering;

    #[test]
    fn who_has_opened_the_port_is_told() {
        let stream = answering(move |line| {
            Some(match line.contains("query-chardev") {
                true => concat!(
                    r#"{"return": [{"label": "ab", "frontend-open": true}, "#,
                    r#"{"label": "a", "filename": "fd:3", "frontend-open": false}, {"label": 5}]}"#,
                    "\n"
                )
                .to_owned(),
                false => "{\"return\": {}}\n".to_owned(),
            })
        });
        let mut monitor = Monitor::begin(stream, Duration::from_secs(20)).expect("it answers");
        for (id, open) in [("ab", true), ("a", false), ("c", false)] {
            assert_eq!(is_open(&mut monitor, id).expect("asked"), open, "{id}");
        }
    }

    #[test]
    fn the_port_is_on_a_bus_of_its_own() {
        let line =
            |machine| words(machine, Path::new("/run/a,b")).expect("words").concat().join(" ");
        assert_eq!(
            line("q35"),
            "-chardev socket,id=strata-memory,path=/run/a,,b/strata-memory,server=on,wait=off \
             -device virtio-serial-pci,id=strata-serial \
             -device virtserialport,bus=strata-serial.0,chardev=strata-memory,name=org.strata.memory.0"
        );
        assert!(line("microvm").contains("virtio-serial-device,id="));
        let long = format!("/{}", "d".repeat(94));
        assert!(words("q35", Path::new(&long)).is_err());
    }
}
