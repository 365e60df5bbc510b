//! What differs between two texts, line by line, as `diff -u` shows it.

use std::fmt::Write as _;

/// Lines shown around what differs.
const CONTEXT: usize = 3;
/// Most pairs of lines that are compared with each other; beyond that the differing part
/// is shown as all old and all new.
const MAX_PAIRS: usize = 4 << 20;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step<'a> {
    Same(&'a str),
    Old(&'a str),
    New(&'a str),
}

/// Empty: nothing differs.
#[must_use]
pub fn unified(old: &str, new: &str, old_name: &str, new_name: &str) -> String {
    let steps = steps(&old.lines().collect::<Vec<_>>(), &new.lines().collect::<Vec<_>>());
    let differs = |step: &Step<'_>| !matches!(step, Step::Same(_));
    let mut out = String::new();
    let (mut old_line, mut new_line) = (1, 1);
    let mut at = 0;
    while let Some(next) = steps[at..].iter().position(differs) {
        let begin = (at + next).saturating_sub(CONTEXT).max(at);
        // Up to where nothing differs for twice the context.
        let mut end = at + next;
        while let Some(more) = steps[end..].iter().take(2 * CONTEXT + 1).position(differs) {
            end += more + 1;
        }
        let end = (end + CONTEXT).min(steps.len());
        let count = |steps: &[Step<'_>]| {
            let of = |wanted: fn(&Step<'_>) -> bool| steps.iter().filter(|s| wanted(s)).count();
            (of(|s| !matches!(s, Step::New(_))), of(|s| !matches!(s, Step::Old(_))))
        };
        let (skipped_old, skipped_new) = count(&steps[at..begin]);
        (old_line, new_line) = (old_line + skipped_old, new_line + skipped_new);
        let (olds, news) = count(&steps[begin..end]);
        if out.is_empty() {
            let _ = writeln!(out, "--- {old_name}\n+++ {new_name}");
        }
        let _ = writeln!(out, "@@ -{old_line},{olds} +{new_line},{news} @@");
        for step in &steps[begin..end] {
            let _ = match step {
                Step::Same(line) => writeln!(out, " {line}"),
                Step::Old(line) => writeln!(out, "-{line}"),
                Step::New(line) => writeln!(out, "+{line}"),
            };
        }
        (old_line, new_line) = (old_line + olds, new_line + news);
        at = end;
    }
    out
}

/// From the old lines to the new ones, with as many of them kept as can be.
fn steps<'a>(old: &[&'a str], new: &[&'a str]) -> Vec<Step<'a>> {
    let first = old.iter().zip(new).take_while(|(a, b)| a == b).count();
    let (old_rest, new_rest) = (&old[first..], &new[first..]);
    let last = old_rest.iter().rev().zip(new_rest.iter().rev()).take_while(|(a, b)| a == b).count();
    let (a, b) = (&old_rest[..old_rest.len() - last], &new_rest[..new_rest.len() - last]);
    let mut steps: Vec<Step<'_>> = old[..first].iter().map(|line| Step::Same(line)).collect();
    if a.len().saturating_mul(b.len()) > MAX_PAIRS {
        steps.extend(a.iter().map(|line| Step::Old(line)));
        steps.extend(b.iter().map(|line| Step::New(line)));
    } else {
        steps.extend(between(a, b));
    }
    steps.extend(old[old.len() - last..].iter().map(|line| Step::Same(line)));
    steps
}

/// By the longest common subsequence.
fn between<'a>(a: &[&'a str], b: &[&'a str]) -> Vec<Step<'a>> {
    let width = b.len() + 1;
    let mut longest = vec![0_u32; (a.len() + 1) * width];
    for i in (0..a.len()).rev() {
        for j in (0..b.len()).rev() {
            longest[i * width + j] = if a[i] == b[j] {
                longest[(i + 1) * width + j + 1] + 1
            } else {
                longest[(i + 1) * width + j].max(longest[i * width + j + 1])
            };
        }
    }
    let mut steps = Vec::new();
    let (mut i, mut j) = (0, 0);
    while i < a.len() || j < b.len() {
        if i < a.len() && j < b.len() && a[i] == b[j] {
            steps.push(Step::Same(a[i]));
            (i, j) = (i + 1, j + 1);
        } else if j == b.len()
            || i < a.len() && longest[(i + 1) * width + j] >= longest[i * width + j + 1]
        {
            steps.push(Step::Old(a[i]));
            i += 1;
        } else {
            steps.push(Step::New(b[j]));
            j += 1;
        }
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(numbers: impl IntoIterator<Item = u32>) -> String {
        numbers.into_iter().map(|number| format!("{number}\n")).collect()
    }

    #[test]
    fn differences_are_shown_with_what_is_around_them() {
        let old = lines(1..=20);
        let new = old.replace("\n5\n", "\n5\n5.5\n").replace("\n16\n", "\nsixteen\n");
        let expected = "--- a\n+++ b\n@@ -3,6 +3,7 @@\n 3\n 4\n 5\n+5.5\n 6\n 7\n 8\n\
                        @@ -13,7 +14,7 @@\n 13\n 14\n 15\n-16\n+sixteen\n 17\n 18\n 19\n";
        assert_eq!(unified(&old, &new, "a", "b"), expected);
        assert_eq!(unified(&old, &old, "a", "b"), "");
        // What is near is one piece.
        let near = old.replace("\n5\n", "\n").replace("\n10\n", "\n");
        assert_eq!(unified(&old, &near, "a", "b").matches("@@ -").count(), 1);
        assert_eq!(unified("", "x\n", "a", "b"), "--- a\n+++ b\n@@ -1,0 +1,1 @@\n+x\n");
    }

    #[test]
    fn the_steps_lead_from_the_old_to_the_new() {
        let mut state = 1_u64;
        let mut random = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % below
        };
        for _ in 0..500 {
            let (a, b) = (random(12), random(12));
            let old = lines((0..a).map(|_| random(4) as u32));
            let new = lines((0..b).map(|_| random(4) as u32));
            let (old, new): (Vec<&str>, Vec<&str>) = (old.lines().collect(), new.lines().collect());
            let steps = steps(&old, &new);
            let olds: Vec<&str> = steps
                .iter()
                .filter_map(|step| match step {
                    Step::Same(line) | Step::Old(line) => Some(*line),
                    Step::New(_) => None,
                })
                .collect();
            let news: Vec<&str> = steps
                .iter()
                .filter_map(|step| match step {
                    Step::Same(line) | Step::New(line) => Some(*line),
                    Step::Old(_) => None,
                })
                .collect();
            assert_eq!((olds, news), (old, new));
        }
    }

    #[test]
    fn what_is_too_long_to_compare_is_all_old_and_all_new() {
        let old = lines(0..3000);
        let new = lines(3000..6000);
        let shown = unified(&old, &new, "a", "b");
        assert_eq!(shown.lines().count(), 3 + 6000);
    }
}
