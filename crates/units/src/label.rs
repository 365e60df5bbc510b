//! Labels of snapshots. Here, because the library inside a program checks them
//! too.

/// Longest label.
pub const MAX_LABEL_BYTES: usize = 64;

/// Why `label` cannot label a snapshot; None when it can. Labels are words on
/// a command line and in a listing; they never become parts of paths.
#[must_use]
pub fn label_problem(label: &str) -> Option<&'static str> {
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
    if label.is_empty() {
        Some("a label may not be empty")
    } else if label.len() > MAX_LABEL_BYTES {
        Some("a label has at most 64 characters")
    } else if !label.bytes().all(plain) {
        Some("a label consists of letters, digits, '.', '_' and '-'")
    } else if label.bytes().all(|b| b.is_ascii_digit()) {
        Some("a label of digits alone would be taken for a snapshot's number")
    } else {
        None
    }
}
