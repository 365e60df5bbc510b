//! Which known word somebody meant.

/// Fewest insertions, deletions, replacements and swaps of neighbours that make
/// `b` of `a` (optimal string alignment).
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut rows = vec![vec![0; b.len() + 1]; a.len() + 1];
    for (i, row) in rows.iter_mut().enumerate() {
        row[0] = i;
    }
    rows[0] = (0..=b.len()).collect();
    for i in 1..=a.len() {
        for j in 1..=b.len() {
            let replaced = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut best = replaced.min(rows[i - 1][j] + 1).min(rows[i][j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                best = best.min(rows[i - 2][j - 2] + 1);
            }
            rows[i][j] = best;
        }
    }
    rows[a.len()][b.len()]
}

/// Longest word that is compared: the work grows with its length, and nobody
/// mistypes a key into more than this.
const MAX_CHARS: usize = 64;

/// The known word that is nearest to `word`; the first of several. `known` is
/// not empty.
pub(crate) fn nearest<'a>(word: &str, known: &[&'a str]) -> &'a str {
    let word: String = word.to_lowercase().replace('-', "_").chars().take(MAX_CHARS).collect();
    known.iter().min_by_key(|candidate| distance(&word, candidate)).expect("known is not empty")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances() {
        for (a, b, expected) in [
            ("", "", 0),
            ("", "abc", 3),
            ("abc", "abc", 0),
            ("abc", "abd", 1),
            ("abc", "acb", 1),
            ("kitten", "sitting", 3),
            ("metrics", "metric", 1),
        ] {
            assert_eq!(distance(a, b), expected, "{a} {b}");
            assert_eq!(distance(b, a), expected, "{b} {a}");
        }
    }

    #[test]
    fn what_was_meant() {
        let known = ["socket_dir", "default_dram", "metrics", "tier_path", "tier_limit", "preload"];
        for (typed, meant) in [
            ("metrcis", "metrics"),
            ("Socket-Dir", "socket_dir"),
            ("defaultdram", "default_dram"),
            ("tier_limt", "tier_limit"),
            ("preloaded", "preload"),
        ] {
            assert_eq!(nearest(typed, &known), meant, "{typed}");
        }
    }
}
