//! `strata vm run --self-balloon`: what it says of how a guest's balloon follows the guest,
//! and how what came of it is shown.

use clap::Args;
use strata_api::{BalloonStats, GuestStats, SelfBalloon};
use strata_units::ByteSize;

use crate::failure::{Failure, Result, printable};

/// How a guest's balloon follows it.
#[derive(Args, Debug, Clone)]
pub(crate) struct SelfBalloonArguments {
    /// Take memory that the guest does not need, as its agent says, and give back what it does
    ///
    /// Off unless it is given. More can be said behind it: floor, headroom, hysteresis, up and
    /// down (in a second), swap-in, refaults (sizes), headroom-percent, committed-percent,
    /// some-percent, full-percent, low-percent, calm, remember and stale (seconds), as in
    /// --self-balloon=floor=512MiB,calm=60.
    #[arg(long = "self-balloon", value_name = "KEY=VALUE,…", num_args = 0..=1,
        require_equals = true, default_missing_value = "")]
    said: Option<String>,
}

impl SelfBalloonArguments {
    /// What is said, for a guest of that size.
    pub(crate) fn settings(&self, memory: ByteSize, what: &str) -> Result<Option<SelfBalloon>> {
        let Some(said) = &self.said else { return Ok(None) };
        let settings = parse(said, memory.0).map_err(|(why, todo)| {
            Failure::new(what, format!("--self-balloon: {why}")).todo(todo)
        })?;
        Ok(Some(settings))
    }
}

type Refused = (String, String);

fn parse(said: &str, memory_bytes: u64) -> std::result::Result<SelfBalloon, Refused> {
    let mut settings = SelfBalloon::for_memory(memory_bytes);
    for pair in said.split(',').filter(|pair| !pair.is_empty()) {
        let Some((key, value)) = pair.split_once('=') else {
            return Err((format!("{pair} has no value"), format!("write {pair}=…")));
        };
        set(&mut settings, key, value)?;
    }
    match settings.problem(memory_bytes) {
        None => Ok(settings),
        Some(problem) => Err((problem.to_owned(), "correct it".to_owned())),
    }
}

fn set(settings: &mut SelfBalloon, key: &str, value: &str) -> std::result::Result<(), Refused> {
    let sizes: [(&str, &mut u64); 7] = [
        ("floor", &mut settings.floor_bytes),
        ("headroom", &mut settings.headroom_bytes),
        ("hysteresis", &mut settings.hysteresis_bytes),
        ("up", &mut settings.up_bytes),
        ("down", &mut settings.down_bytes),
        ("swap-in", &mut settings.swap_in_bytes),
        ("refaults", &mut settings.refault_bytes),
    ];
    let numbers: [(&str, &mut u32); 8] = [
        ("headroom-percent", &mut settings.headroom_percent),
        ("committed-percent", &mut settings.committed_percent),
        ("some-percent", &mut settings.some_percent),
        ("full-percent", &mut settings.full_percent),
        ("low-percent", &mut settings.low_percent),
        ("calm", &mut settings.calm_s),
        ("remember", &mut settings.remember_s),
        ("stale", &mut settings.stale_s),
    ];
    let keys: Vec<&str> =
        sizes.iter().map(|(key, _)| *key).chain(numbers.iter().map(|(key, _)| *key)).collect();
    let todo = format!("the keys are {}", keys.join(", "));
    for (known, place) in sizes {
        if known == key {
            let size = value.parse::<ByteSize>();
            let size = size.map_err(|error| (format!("{key}: {error}"), todo.clone()))?;
            *place = size.0;
            return Ok(());
        }
    }
    for (known, place) in numbers {
        if known == key {
            let number = value.strip_suffix(['%', 's']).unwrap_or(value);
            *place = number.parse().map_err(|_| {
                (format!("{key}={value} is no number"), format!("write it as {key}=20"))
            })?;
            return Ok(());
        }
    }
    Err((format!("{key} is not known"), todo))
}

/// What it is to have and why, in a word or two; for one whose balloon stays, nothing.
pub(crate) fn target(guest: &GuestStats) -> String {
    match &guest.self_balloon {
        None => "-".to_owned(),
        Some(stats) => match stats.target_bytes {
            None => "not known yet".to_owned(),
            Some(bytes) => format!("{}: {}", ByteSize(bytes), printable(&stats.why)),
        },
    }
}

/// The rows of one guest's figures.
pub(crate) fn rows(guest: &GuestStats) -> Vec<[String; 2]> {
    let Some(BalloonStats { by, given_back_total, given_back_why, .. }) = &guest.self_balloon
    else {
        return Vec::new();
    };
    let by = match by.as_str() {
        "agent" => "its agent's",
        "driver" => "its balloon's driver's",
        _ => "nobody's: then it gets everything back",
    };
    let mut back = format!("{given_back_total} times");
    if !given_back_why.is_empty() {
        back += &format!(", the last time because {}", printable(given_back_why));
    }
    vec![
        ["balloon is to leave it".to_owned(), target(guest)],
        ["by whose word".to_owned(), by.to_owned()],
        ["got everything back".to_owned(), back],
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMORY: u64 = 1 << 30;

    #[test]
    fn what_is_said_changes_what_serves() {
        let whole = SelfBalloon::for_memory(MEMORY);
        assert_eq!(parse("", MEMORY), Ok(whole));
        let said = "floor=128MiB,down=1GiB,low-percent=20%,calm=7s,stale=9,refaults=2MiB";
        let expected = SelfBalloon {
            floor_bytes: 128 << 20,
            down_bytes: 1 << 30,
            low_percent: 20,
            calm_s: 7,
            stale_s: 9,
            refault_bytes: 2 << 20,
            ..whole
        };
        assert_eq!(parse(said, MEMORY), Ok(expected));
        for (said, why) in [
            ("floor", "floor has no value"),
            ("floor=2GiB", "more than the guest's memory"),
            ("floor=12", "is not a size"),
            ("calm=soon", "is no number"),
            ("colour=blue", "colour is not known"),
        ] {
            let (said_why, todo) = parse(said, MEMORY).expect_err(said);
            assert!(said_why.contains(why) && !todo.is_empty(), "{said_why}; {todo}");
        }
    }

    #[test]
    fn what_came_of_it_is_shown() {
        let mut guest = GuestStats::default();
        assert_eq!((target(&guest), rows(&guest).len()), ("-".to_owned(), 0));
        let stats = BalloonStats {
            target_bytes: Some(96 << 20),
            why: "it needs less".into(),
            by: "agent".into(),
            given_back_total: 2,
            given_back_why: "it waits for memory".into(),
        };
        guest.self_balloon = Some(stats);
        let shown = rows(&guest).concat().join("|");
        for text in [
            "96.0 MiB: it needs less",
            "its agent's",
            "2 times, the last time because it waits for memory",
        ] {
            assert!(shown.contains(text), "{text} is not in {shown}");
        }
        guest.self_balloon = Some(BalloonStats::default());
        let shown = rows(&guest).concat().join("|");
        assert!(shown.contains("not known yet") && shown.contains("nobody's"), "{shown}");
    }
}
