use std::io::{BufRead, BufReader, Write};

use strata_units::reading::asked;
use strata_vm::self_balloon::Statistics;

use super::*;

const MIB: u64 = 1 << 20;
const MEMORY: u64 = 1024 * MIB;
const SECOND: Duration = Duration::from_secs(1);

/// A guest with an agent, and the time.
struct Place {
    following: Following,
    agent: Option<UnixStream>,
    now: Instant,
    balloon: u64,
    reading: Reading,
    room: Option<i64>,
}

impl Place {
    fn new(has_agent: bool) -> Self {
        let settings = SelfBalloon { calm_s: 0, ..SelfBalloon::for_memory(MEMORY) };
        let now = Instant::now();
        let wish = Wish {
            folder: "0.web1".into(),
            made: now,
            memory_bytes: MEMORY,
            balloon: "b".into(),
            settings,
        };
        let reading = Reading {
            at_ms: 5000,
            total_bytes: MEMORY - 30 * MIB,
            committed_bytes: Some(50 * MIB),
            some_us: Some(0),
            ..Reading::default()
        };
        let following = Following::new(&wish, has_agent, now);
        Self { following, agent: None, now, balloon: MEMORY, reading, room: None }
    }

    /// A connection, if there is none.
    fn listen(&mut self) -> bool {
        let agent = &mut self.agent;
        let mut connect = || {
            let (ours, theirs) = UnixStream::pair().expect("a pair");
            *agent = Some(theirs);
            Some(ours)
        };
        self.following.listen(&mut connect, self.now)
    }

    /// The number of the last question.
    fn question(&mut self) -> u64 {
        let agent = self.agent.as_ref().expect("connected");
        agent.set_nonblocking(true).expect("set");
        let lines = BufReader::new(agent).lines().map_while(Result::ok);
        lines.filter_map(|line| asked(line.as_bytes())).last().expect("it was asked")
    }

    fn say(&mut self, heard: u64) {
        self.reading.heard = heard;
        self.reading.at_ms += 1000;
        self.reading.available_bytes = (self.balloon - 100 * MIB).min(self.reading.total_bytes);
        let mut agent = self.agent.as_ref().expect("connected");
        writeln!(agent, "{}", self.reading).expect("room");
    }

    fn held(&self) -> Held {
        Held { runs: true, balloon_bytes: Some(self.balloon), statistics: None }
    }

    /// Asked, answered, decided and done, in a second.
    fn second(&mut self) -> Option<u64> {
        self.listen();
        let heard = self.question();
        self.say(heard);
        self.now += SECOND;
        self.listen();
        assert!(self.following.is_due(self.now));
        let held = self.held();
        let order = self.following.decide(&held, self.room, self.now);
        self.balloon = order.unwrap_or(self.balloon);
        order
    }
}

#[test]
fn a_guest_shrinks_by_its_agents_word_and_silence_gives_it_back() {
    let mut place = Place::new(false);
    assert_eq!(place.second(), None);
    assert_eq!(place.following.stats.by, "agent");
    for _ in 0..3 {
        assert!(place.second().is_some_and(|bytes| bytes < MEMORY), "{:?}", place.following.stats);
    }
    let stats = &place.following.stats;
    assert_eq!((stats.target_bytes, stats.given_back_total), (Some(place.balloon), 0));
    // It says nothing for as long as a reading is good, and then for longer.
    let silent_since = place.now;
    place.now += 4 * SECOND;
    assert!(!place.listen());
    assert!(place.following.is_due(place.now));
    let held = place.held();
    assert!(
        place.following.decide(&held, None, place.now).is_none_or(|bytes| bytes >= place.balloon)
    );
    place.now = silent_since + 7 * SECOND;
    assert_eq!(place.following.decide(&held, None, place.now), Some(MEMORY));
    let stats = place.following.stats.clone();
    assert_eq!((stats.by.as_str(), stats.given_back_total), ("", 1));
    assert_eq!(stats.given_back_why, Why::Stale.text());
    // The order is not given again and again, and is after a while.
    assert_eq!(place.following.decide(&held, None, place.now + SECOND), None);
    assert_eq!(place.following.decide(&held, None, place.now + ORDER_AGAIN), Some(MEMORY));
    assert_eq!(place.following.stats.given_back_total, 1);
}

#[test]
fn a_guest_that_waits_gets_what_its_budget_has_room_for_and_the_rest_is_told() {
    let mut place = Place::new(true);
    place.second();
    place.balloon = 300 * MIB;
    place.following.held.clear();
    place.room = Some(100 * MIB as i64);
    place.reading.some_us = Some(500_000);
    assert_eq!(place.second(), Some(400 * MIB));
    let lack = place.following.lack.expect("it was heard");
    assert_eq!((lack.bytes, lack.stall), (MEMORY - 300 * MIB, 0.5));
    place.room = Some(-50 * MIB as i64);
    place.reading.some_us = Some(1_000_000);
    let order = place.second().expect("it has too much");
    assert!((350 * MIB..400 * MIB).contains(&order), "{order}: down at its own pace");
    // A guest that has stopped lacks nothing.
    let held = Held { runs: false, ..place.held() };
    assert_eq!(place.following.decide(&held, None, place.now), None);
    assert_eq!(place.following.lack, None);
}

#[test]
fn an_answer_to_another_workers_question_is_none() {
    let mut place = Place::new(false);
    place.listen();
    let number = place.question();
    for heard in [0, number - 1, number + 1] {
        place.say(heard);
    }
    let mut agent = place.agent.as_ref().expect("connected");
    writeln!(agent, "nonsense\nstrata-memory/1 heard={number}").expect("room");
    assert!(!place.listen());
    assert!(!place.following.is_new && !place.following.has_agent);
    place.say(number);
    assert!(place.listen() && place.following.is_new);
    // Only the first time is one.
    place.say(number);
    assert!(!place.listen());
}

#[test]
fn a_new_worker_gives_back_first() {
    let mut place = Place::new(true);
    place.balloon = 300 * MIB;
    let held = place.held();
    assert_eq!(place.following.decide(&held, None, place.now), Some(MEMORY));
    let stats = &place.following.stats;
    assert_eq!((stats.given_back_total, stats.by.as_str()), (1, ""));
    assert_eq!(stats.given_back_why, Why::Silent.text());
}

#[test]
fn where_no_agent_ever_spoke_the_driver_does() {
    let mut place = Place::new(false);
    let told = |told_s: u64| {
        let available_bytes = MEMORY - 130 * MIB;
        let total_bytes = MEMORY - 30 * MIB;
        let at_ms = told_s * 1000;
        let reading = Reading { at_ms, total_bytes, available_bytes, ..Reading::default() };
        Some(Statistics { told_s, reading })
    };
    let mut look = |after_s: u64, told_s: u64| {
        place.now += Duration::from_secs(after_s);
        let held = Held { statistics: told(told_s), ..place.held() };
        (place.following.decide(&held, None, place.now), place.following.stats.why.clone())
    };
    assert_eq!(look(2, 10), (None, Why::Silent.text().to_owned()));
    // What is seen first may be of any age; what is new is the first thing heard.
    assert_eq!(look(15, 10), (None, Why::Silent.text().to_owned()));
    assert_eq!(look(2, 12), (None, Why::First.text().to_owned()));
    let (order, why) = look(2, 14);
    assert!(order.is_some_and(|bytes| bytes < MEMORY), "{why}");
    assert_eq!(why, Why::Shrinks.text());
    // The driver tells nothing new.
    place.balloon = order.expect("ordered");
    place.now += 8 * SECOND;
    let held = Held { statistics: told(14), ..place.held() };
    assert_eq!(place.following.decide(&held, None, place.now), Some(MEMORY));
    // An agent has spoken: the driver's word counts no more.
    place.following.has_agent = true;
    place.now += SECOND;
    let held = Held { statistics: told(20), ..place.held() };
    assert_eq!(place.following.decide(&held, None, place.now), None);
    assert_eq!(place.following.stats.why, Why::Stale.text());
}

#[test]
fn what_stands_still_or_does_not_answer_is_told_nothing() {
    let mut place = Place::new(false);
    place.second();
    let held = Held { runs: false, ..place.held() };
    assert_eq!(place.following.decide(&held, None, place.now), None);
    assert_eq!(place.following.stats.target_bytes, None);
    let held = Held { balloon_bytes: None, ..place.held() };
    assert_eq!(place.following.decide(&held, None, place.now), None);
    assert!(place.following.stats.why.contains("does not answer"));
    place.following.failed("hung up".into(), place.now);
    assert!(!place.following.is_due(place.now + LOOK_AGAIN));
    for _ in 0..10 {
        place.following.failed("hung up".into(), place.now);
    }
    assert!(place.following.is_due(place.now + SELDOM));
}

#[test]
fn a_port_that_hangs_up_is_connected_again() {
    let mut place = Place::new(false);
    place.second();
    place.agent = None;
    place.listen();
    assert!(place.following.channel.is_none());
    place.listen();
    assert!(place.agent.is_none(), "not at once");
    place.now += CONNECT_AGAIN;
    place.listen();
    assert!(place.agent.is_some());
    place.second();
    assert_eq!(place.following.stats.by, "agent");
}

#[test]
fn the_most_that_a_guest_had_counts() {
    let mut place = Place::new(false);
    let at = |seconds: u32| place.now + seconds * SECOND;
    place.following.held = [(at(0), 9), (at(1), 7), (at(2), 5), (at(3), 6)].into();
    for (then, most) in [(0, 9), (1, 7), (2, 6), (3, 6), (9, 6)] {
        assert_eq!(place.following.had_since(at(then)), most, "{then}");
    }
    place.following.held.clear();
    assert_eq!(place.following.had_since(place.now), 0);
}
