//! Byte sizes as people write them: `"4GiB"`, `"512M"`, `"1.5 GiB"`.

use core::{fmt, str::FromStr};

/// A number of bytes. Parsing demands a unit: a bare number is refused, because
/// nobody can tell whether it meant bytes or mebibytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct ByteSize(pub u64);

/// Why a size was refused. Displays as one line that says what to write instead.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ParseByteSizeError {
    text: String,
    reason: &'static str,
}

impl fmt::Display for ParseByteSizeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:?} is not a size: {} (write it as 512MiB, 4GiB or 1.5GiB)",
            self.text, self.reason
        )
    }
}

impl std::error::Error for ParseByteSizeError {}

const UNITS: [(&str, u64); 14] = [
    ("b", 1),
    ("k", 1 << 10),
    ("kb", 1000),
    ("kib", 1 << 10),
    ("m", 1 << 20),
    ("mb", 1_000_000),
    ("mib", 1 << 20),
    ("g", 1 << 30),
    ("gb", 1_000_000_000),
    ("gib", 1 << 30),
    ("t", 1 << 40),
    ("tb", 1_000_000_000_000),
    ("tib", 1 << 40),
    ("bytes", 1),
];

impl FromStr for ByteSize {
    type Err = ParseByteSizeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let refuse = |reason| Err(ParseByteSizeError { text: text.to_owned(), reason });
        let trimmed = text.trim();
        if trimmed.starts_with('-') {
            return refuse("it is negative");
        }
        let split = trimmed.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(split);
        let (number, unit) = (number.trim(), unit.trim().to_ascii_lowercase());
        if number.is_empty() || !number.bytes().all(|b| b.is_ascii_digit() || b == b'.') {
            return refuse("it does not start with a number");
        }
        if unit.is_empty() {
            return refuse("it has no unit");
        }
        let Some(&(_, scale)) = UNITS.iter().find(|(name, _)| *name == unit) else {
            return refuse("its unit is unknown");
        };
        let Ok(value) = number.parse::<f64>() else {
            return refuse("its number cannot be read");
        };
        let bytes = value * scale as f64;
        if bytes >= (1u64 << 62) as f64 {
            return refuse("it is larger than any machine");
        }
        if bytes < 1.0 {
            return refuse("it is zero");
        }
        Ok(Self(bytes as u64))
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self.0 {
            n if n >= 1 << 40 => format!("{:.1} TiB", n as f64 / (1u64 << 40) as f64),
            n if n >= 1 << 30 => format!("{:.1} GiB", n as f64 / (1u64 << 30) as f64),
            n if n >= 1 << 20 => format!("{:.1} MiB", n as f64 / (1u64 << 20) as f64),
            n if n >= 1 << 10 => format!("{:.1} KiB", n as f64 / 1024.0),
            n => format!("{n} B"),
        };
        f.pad(&text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_people_write() {
        for (text, bytes) in [
            ("4GiB", 4 << 30),
            ("512M", 512 << 20),
            ("1.5 GiB", 3 << 29),
            ("64kib", 64 << 10),
            ("2gb", 2_000_000_000),
            ("4096 bytes", 4096),
        ] {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
    }

    #[test]
    fn refused_with_the_reason() {
        for (text, reason) in [
            ("-1GiB", "negative"),
            ("512", "no unit"),
            ("", "number"),
            ("GiB", "number"),
            ("1XiB", "unit is unknown"),
            ("1.2.3GiB", "cannot be read"),
            ("99999999999TiB", "larger than any machine"),
            ("0GiB", "zero"),
        ] {
            let error = text.parse::<ByteSize>().expect_err(text).to_string();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }
}
