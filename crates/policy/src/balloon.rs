//! How much memory a guest's balloon is to leave it, by what the guest says of itself.
//!
//! Memory that a guest does not need is taken from it slowly, and what it needs is given
//! back fast; under pressure it gets everything back in one step. What a guest needs is what
//! it has and could not give up, or what its programs may come to use (`Committed_AS`, as
//! Magenheimer's self-ballooning of 2008 has it), whichever is more, and headroom.
//!
//! Where the host has no DRAM for everything, it says how much it has for the guest: what it
//! would have to evict at once is not given, so that the guest drops what it can read again
//! instead of the host compressing it. What the guest cannot give up it has even then.
//!
//! A guest is a stranger. Without a fresh reading that makes sense nothing is ever taken:
//! silence means "give back". What it says can only change what it has itself, between the
//! floor and what it was promised, down no faster than the settings say.

use strata_units::PAGE_SIZE;
use strata_units::reading::Reading;

/// The most seconds that one step down is for, however long ago the last one was.
const LONGEST_STEP_S: f64 = 2.0;
/// What a guest may say that it has beside what its balloon leaves it: a part of that, since
/// the two were not looked at in one moment.
const TOLERATED_PART: u64 = 64;

/// How a guest is treated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Settings {
    /// It always keeps so much.
    pub floor_bytes: u64,
    /// What it has beyond its need, at least, ...
    pub headroom_bytes: u64,
    /// ...and in percent of its need. Twice as much where `Committed_AS` is not told.
    pub headroom_percent: u32,
    /// How much of `Committed_AS` counts as needed.
    pub committed_percent: u32,
    /// Smaller changes are none.
    pub hysteresis_bytes: u64,
    /// How fast it grows, in a second.
    pub up_bytes: u64,
    /// How fast it shrinks, in a second.
    pub down_bytes: u64,
    /// It is pressed if some of its tasks wait for memory so much of the time, ...
    pub some_percent: u32,
    /// ...or all of them so much, ...
    pub full_percent: u32,
    /// ...or so much comes in from swap in a second, ...
    pub swap_in_bytes: u64,
    /// ...or less of its headroom than this is available.
    pub low_percent: u32,
    /// If so much of what was reclaimed is wanted again in a second, it grows.
    pub refault_bytes: u64,
    /// It shrinks when it has not been pressed for so long, ...
    pub calm_s: u32,
    /// ...and not to where it was pressed for so long.
    pub remember_s: u32,
    /// A reading that is older is none.
    pub stale_s: u32,
}

/// What is known, by the host's own clock and view but for the reading.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Seen {
    /// What the guest is promised.
    pub memory_bytes: u64,
    /// What its balloon leaves it now.
    pub balloon_bytes: u64,
    /// The most that it left it since the reading was asked for.
    pub had_bytes: u64,
    /// Since the last decision.
    pub seconds: f64,
    /// What the guest says, and how old that is at most, in seconds.
    pub reading: Option<(Reading, f64)>,
    /// What the host has DRAM for; none: it does not bound the guest.
    pub fits_bytes: Option<u64>,
}

/// What a guest would have without a bound of the host's, and what it suffers without it.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Wish {
    /// What its balloon would leave it.
    pub bytes: u64,
    /// Part of the time in which some of its tasks waited for memory.
    pub stall: f64,
    /// What it read again in a second: from its swap, and of what it had given up.
    pub returned_bytes: f64,
}

/// What is remembered of a guest from decision to decision.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Past {
    last: Option<Reading>,
    target: Option<Target>,
    wish: Option<Wish>,
    calm_s: f64,
    /// What it had when it was last pressed.
    pressed_bytes: u64,
    since_pressed_s: f64,
}

impl Past {
    /// By the last reading; none: there is none that makes sense.
    #[must_use]
    pub fn wish(&self) -> Option<Wish> {
        self.wish
    }
}

/// Why a guest is to have what it is to have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Why {
    /// Nothing was heard.
    Silent,
    /// What was heard is too old.
    Stale,
    /// What was heard cannot be.
    Nonsense,
    /// It waits for memory.
    Stalled,
    /// It reads from its swap.
    Swaps,
    /// Hardly anything is left.
    Low,
    /// It wants again what it had reclaimed.
    Refaults,
    /// It needs more than it has.
    Grows,
    /// This is the first reading since it started, or since it was silent.
    First,
    /// It needs less than it has, and was pressed not long ago.
    Waits,
    /// It needs less than it has.
    Shrinks,
    /// It has what it needs.
    Fits,
    /// It would have more, and the host has no DRAM for that.
    Bounded,
}

impl Why {
    /// Whether everything is given back.
    #[must_use]
    pub fn gives_back(self) -> bool {
        match self {
            Self::Silent | Self::Stale | Self::Nonsense | Self::First => true,
            Self::Stalled | Self::Swaps | Self::Low => true,
            Self::Refaults | Self::Grows | Self::Fits | Self::Waits | Self::Shrinks => false,
            Self::Bounded => false,
        }
    }

    /// In words.
    #[must_use]
    pub fn text(self) -> &'static str {
        match self {
            Self::Silent => "nothing is heard from it",
            Self::Stale => "what it said is too old",
            Self::Nonsense => "what it says cannot be",
            Self::Stalled => "it waits for memory",
            Self::Swaps => "it reads from its swap",
            Self::Low => "it has hardly any left",
            Self::Refaults => "it wants again what it had to give up",
            Self::Grows => "it needs more",
            Self::First => "it has just begun to say what it needs",
            Self::Waits => "it needs less, and was short not long ago",
            Self::Shrinks => "it needs less",
            Self::Fits => "it has what it needs",
            Self::Bounded => "the host has no DRAM for more",
        }
    }
}

/// What a guest is to have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Target {
    /// So much its balloon is to leave it.
    pub bytes: u64,
    /// Why.
    pub why: Why,
}

/// What happened between two readings, in a second.
struct Rates {
    some: f64,
    full: f64,
    swap_in_bytes: f64,
    refault_bytes: f64,
}

impl Rates {
    /// None: a counter has fallen, so the guest, or who speaks for it, is another one.
    fn between(old: &Reading, new: &Reading) -> Option<Self> {
        let seconds = new.at_ms.checked_sub(old.at_ms)? as f64 / 1000.0;
        let grown = |old: Option<u64>, new: Option<u64>| match (old, new) {
            (Some(old), Some(new)) => new.checked_sub(old).map(|more| more as f64 / seconds),
            _ => Some(0.0),
        };
        let pages = |old, new| Some(grown(old, new)? * PAGE_SIZE as f64);
        Some(Self {
            some: grown(old.some_us, new.some_us)? / 1e6,
            full: grown(old.full_us, new.full_us)? / 1e6,
            swap_in_bytes: pages(old.swapped_in_pages, new.swapped_in_pages)?,
            refault_bytes: pages(old.refaulted_pages, new.refaulted_pages)?,
        })
    }
}

/// A part of something, in percent.
fn part(bytes: u64, percent: u32) -> u64 {
    (bytes / 100).saturating_mul(u64::from(percent))
}

impl Settings {
    /// Nothing smaller than this, whatever was promised.
    #[must_use]
    pub fn floor_of(&self, memory_bytes: u64) -> u64 {
        self.floor_bytes.min(memory_bytes)
    }

    /// How far it may shrink in one step.
    fn down_in(&self, seconds: f64) -> u64 {
        (self.down_bytes as f64 * seconds.min(LONGEST_STEP_S)) as u64
    }

    fn pressure(&self, rates: &Rates, available: u64, headroom: u64) -> Option<Why> {
        let over = |rate: f64, percent: u32| rate > 0.0 && rate * 100.0 >= f64::from(percent);
        if over(rates.some, self.some_percent) || over(rates.full, self.full_percent) {
            Some(Why::Stalled)
        } else if rates.swap_in_bytes > 0.0 && rates.swap_in_bytes >= self.swap_in_bytes as f64 {
            Some(Why::Swaps)
        } else if available < part(headroom, self.low_percent) {
            Some(Why::Low)
        } else {
            None
        }
    }
}

/// Whether a guest that has at most `had_bytes` can have said this.
fn makes_sense(reading: &Reading, memory_bytes: u64, had_bytes: u64) -> bool {
    let Reading { total_bytes, free_bytes, available_bytes, dirty_bytes, .. } = *reading;
    let tolerated = had_bytes.saturating_add(memory_bytes / TOLERATED_PART);
    (1..=memory_bytes).contains(&total_bytes)
        && free_bytes <= total_bytes
        && dirty_bytes <= total_bytes
        && available_bytes <= total_bytes
        && available_bytes <= tolerated
        && free_bytes <= tolerated
}

/// What the balloon is to leave the guest now. Called with the same reading again it says
/// the same again, as long as that is fresh.
pub fn decide(settings: &Settings, past: &mut Past, seen: &Seen) -> Target {
    let seconds = if seen.seconds.is_finite() { seen.seconds.max(0.0) } else { 0.0 };
    past.since_pressed_s += seconds;
    let target = match seen.reading {
        None => given_back(past, seen, Why::Silent),
        // Written so that an age that is no number is too old.
        Some((_, age_s)) if !(0.0..=f64::from(settings.stale_s)).contains(&age_s) => {
            given_back(past, seen, Why::Stale)
        }
        Some((reading, _)) if !makes_sense(&reading, seen.memory_bytes, seen.had_bytes) => {
            given_back(past, seen, Why::Nonsense)
        }
        Some((reading, _)) => by_reading(settings, past, seen, &reading, seconds),
    };
    past.target = Some(target);
    target
}

/// Everything that it was promised; what is heard next is the first thing that is heard.
fn given_back(past: &mut Past, seen: &Seen, why: Why) -> Target {
    past.last = None;
    past.wish = None;
    past.calm_s = 0.0;
    Target { bytes: seen.memory_bytes, why }
}

fn by_reading(
    settings: &Settings,
    past: &mut Past,
    seen: &Seen,
    reading: &Reading,
    seconds: f64,
) -> Target {
    let before = past.last.replace(*reading);
    let rates = match &before {
        Some(before) if before.at_ms == reading.at_ms => {
            // Nothing new: what was said for it holds, and is no further step.
            let bytes = seen.memory_bytes;
            return past.target.unwrap_or(Target { bytes, why: Why::First });
        }
        Some(before) => Rates::between(before, reading),
        None => None,
    };
    let Some(rates) = rates else {
        past.wish = None;
        past.calm_s = 0.0;
        return Target { bytes: seen.memory_bytes, why: Why::First };
    };
    let needs = Needs::of(settings, seen, reading);
    let wished = wished(settings, past, seen, reading, &rates, &needs, seconds);
    let returned_bytes = rates.swap_in_bytes + rates.refault_bytes;
    past.wish = Some(Wish { bytes: wished.bytes, stall: rates.some, returned_bytes });
    bounded(settings, seen, &needs, wished, seconds)
}

/// What a guest cannot do without, in bytes.
struct Needs {
    /// What it could not give up.
    kept: u64,
    /// That, or what its programs may come to use.
    all: u64,
    /// What it is to have beyond its need.
    headroom: u64,
}

impl Needs {
    fn of(settings: &Settings, seen: &Seen, reading: &Reading) -> Self {
        let had = seen.had_bytes.max(seen.balloon_bytes.min(seen.memory_bytes));
        let kept = had.saturating_sub(reading.available_bytes);
        let kept = kept.saturating_add(reading.dirty_bytes).min(seen.memory_bytes);
        let committed = reading.committed_bytes.unwrap_or(0);
        let all = kept.max(part(committed, settings.committed_percent)).min(seen.memory_bytes);
        let headroom = settings.headroom_bytes.max(part(all, settings.headroom_percent));
        let headroom = match reading.committed_bytes {
            Some(_) => headroom,
            None => headroom.saturating_mul(2),
        };
        Self { kept, all, headroom }
    }
}

/// What it would have if the host had room for everything.
fn wished(
    settings: &Settings,
    past: &mut Past,
    seen: &Seen,
    reading: &Reading,
    rates: &Rates,
    needs: &Needs,
    seconds: f64,
) -> Target {
    let has = seen.balloon_bytes.min(seen.memory_bytes);
    let floor = settings.floor_of(seen.memory_bytes);
    let Needs { all: need, headroom, .. } = *needs;
    if let Some(why) = settings.pressure(rates, reading.available_bytes, headroom) {
        past.calm_s = 0.0;
        past.since_pressed_s = 0.0;
        past.pressed_bytes = has;
        return Target { bytes: seen.memory_bytes, why };
    }
    past.calm_s += seconds;
    let is_calm = past.calm_s >= f64::from(settings.calm_s);
    // What was given back may still be on its way.
    let given = past.target.filter(|_| !is_calm).map_or(0, |target| target.bytes);
    let held = has.max(floor).max(given).min(seen.memory_bytes);
    let is_remembered = past.since_pressed_s < f64::from(settings.remember_s);
    let pressed = if is_remembered { past.pressed_bytes.saturating_add(headroom) } else { 0 };
    let goal = need.saturating_add(headroom).max(pressed).clamp(floor, seen.memory_bytes);
    let up = (settings.up_bytes as f64 * seconds.max(1.0)) as u64;
    let most = has.saturating_add(up).clamp(floor, seen.memory_bytes);
    if rates.refault_bytes > 0.0 && rates.refault_bytes >= settings.refault_bytes as f64 {
        past.calm_s = 0.0;
        return Target { bytes: most.max(held), why: Why::Refaults };
    }
    if goal > has && (goal - has >= settings.hysteresis_bytes || has < floor.max(need)) {
        return Target { bytes: goal.min(most).max(held), why: Why::Grows };
    }
    if has.saturating_sub(goal) < settings.hysteresis_bytes.max(1) {
        return Target { bytes: held, why: Why::Fits };
    }
    if !is_calm {
        return Target { bytes: held, why: Why::Waits };
    }
    // What is free beyond its headroom it does not miss.
    let down = settings.down_in(seconds).max(reading.free_bytes.saturating_sub(headroom));
    Target { bytes: has.saturating_sub(down).max(goal), why: Why::Shrinks }
}

/// That, as far as the host has room. What it could not give up it has all the same, and
/// its headroom; and where it reads from its swap what its programs may come to use: else
/// it would go on giving that up.
fn bounded(
    settings: &Settings,
    seen: &Seen,
    needs: &Needs,
    wished: Target,
    seconds: f64,
) -> Target {
    let Some(fits) = seen.fits_bytes else { return wished };
    let need = if wished.why == Why::Swaps { needs.all } else { needs.kept };
    let bound = fits.max(need.saturating_add(needs.headroom));
    let bound = bound.max(settings.floor_of(seen.memory_bytes)).min(seen.memory_bytes);
    let has = seen.balloon_bytes.min(seen.memory_bytes);
    let over = has.saturating_sub(bound);
    let most = match over {
        0 => bound,
        over if over < settings.hysteresis_bytes => has,
        over => has - over.min(settings.down_in(seconds)),
    };
    if wished.bytes <= most { wished } else { Target { bytes: most, why: Why::Bounded } }
}

#[cfg(test)]
#[path = "balloon_tests.rs"]
mod tests;
