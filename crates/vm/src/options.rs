//! One option's value as QEMU writes it: `type,key=value,…`, where a comma in a value is
//! doubled, or a JSON object.

use std::fmt;

use serde_json::{Map, Value};

use crate::refusals::Refusal;

/// A value in its parts, in order. Keys may come more than once; the last one counts.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Options {
    Pairs(Vec<(String, String)>),
    Json(Map<String, Value>),
}

impl Options {
    /// `implied` is the key of a first part that has none.
    pub(crate) fn parse(text: &str, implied: &str) -> Result<Self, Refusal> {
        if text.trim_start().starts_with('{') {
            return match serde_json::from_str(text) {
                Ok(Value::Object(object)) => Ok(Self::Json(object)),
                _ => Err(Refusal::new(
                    format!("{text} is not JSON"),
                    "correct it: QEMU would not understand it either",
                )),
            };
        }
        let mut pairs = Vec::new();
        for (index, part) in split(text).into_iter().enumerate() {
            let pair = match part.split_once('=') {
                Some((key, value)) => (key.to_owned(), value.to_owned()),
                None if index == 0 => (implied.to_owned(), part),
                None => match part.strip_prefix("no") {
                    // QEMU's short forms of key=off and key=on.
                    Some(key) if !key.is_empty() && is_flag(key) => (key.to_owned(), "off".into()),
                    _ => (part, "on".to_owned()),
                },
            };
            pairs.push(pair);
        }
        Ok(Self::Pairs(pairs))
    }

    pub(crate) fn get(&self, key: &str) -> Option<String> {
        match self {
            Self::Pairs(pairs) => {
                pairs.iter().rev().find(|(known, _)| known == key).map(|(_, value)| value.clone())
            }
            Self::Json(object) => object.get(key).map(|value| match value {
                Value::String(text) => text.clone(),
                Value::Bool(true) => "on".to_owned(),
                Value::Bool(false) => "off".to_owned(),
                other => other.to_string(),
            }),
        }
    }

    pub(crate) fn is_on(&self, key: &str) -> bool {
        self.get(key).is_some_and(|value| matches!(value.as_str(), "on" | "yes" | "true" | "y"))
    }

    /// The value of `key` of the object that is the value of `outer`.
    pub(crate) fn get_below(&self, outer: &str, key: &str) -> Option<String> {
        let dotted = self.get(&format!("{outer}.{key}"));
        match self {
            Self::Json(object) if dotted.is_none() => {
                let below = object.get(outer)?.as_object()?.clone();
                Self::Json(below).get(key)
            }
            _ => dotted,
        }
    }

    /// Sets what [`Self::get_below`] has found.
    pub(crate) fn set_below(&mut self, outer: &str, key: &str, value: &str) {
        let dotted = format!("{outer}.{key}");
        match self {
            Self::Json(object) if !object.contains_key(&dotted) => {
                if let Some(below) = object.get_mut(outer).and_then(Value::as_object_mut) {
                    below.insert(key.to_owned(), Value::String(value.to_owned()));
                }
            }
            _ => self.set(&dotted, value),
        }
    }

    /// Whether the key was there.
    pub(crate) fn remove(&mut self, key: &str) -> bool {
        match self {
            Self::Pairs(pairs) => {
                let before = pairs.len();
                pairs.retain(|(known, _)| known != key);
                pairs.len() < before
            }
            Self::Json(object) => object.remove(key).is_some(),
        }
    }

    /// Sets a key; a truth value where `value` is on or off.
    pub(crate) fn set(&mut self, key: &str, value: &str) {
        match self {
            Self::Pairs(pairs) => {
                let old = pairs.iter_mut().rev().find(|(known, _)| known == key);
                match old {
                    Some(pair) => value.clone_into(&mut pair.1),
                    None => pairs.push((key.to_owned(), value.to_owned())),
                }
            }
            Self::Json(object) => {
                let value = match value {
                    "on" => Value::Bool(true),
                    "off" => Value::Bool(false),
                    text => Value::String(text.to_owned()),
                };
                object.insert(key.to_owned(), value);
            }
        }
    }
}

/// Keys that are written without a value with `no` before them to be off.
fn is_flag(key: &str) -> bool {
    matches!(key, "wait" | "server" | "reconnect" | "ipv4" | "ipv6" | "delay" | "share" | "vhost")
}

impl fmt::Display for Options {
    /// The first key may be left out where it is the implied one; it never is here, and
    /// QEMU takes it so.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pairs(pairs) => {
                for (index, (key, value)) in pairs.iter().enumerate() {
                    let comma = if index == 0 { "" } else { "," };
                    write!(f, "{comma}{key}={}", escaped(value))?;
                }
                Ok(())
            }
            Self::Json(object) => match serde_json::to_string(object) {
                Ok(text) => f.write_str(&text),
                Err(_) => Err(fmt::Error),
            },
        }
    }
}

/// A value with its commas doubled.
pub(crate) fn escaped(value: &str) -> String {
    value.replace(',', ",,")
}

/// At single commas; doubled ones become one.
fn split(text: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut characters = text.chars().peekable();
    while let Some(character) = characters.next() {
        let last = parts.last_mut().expect("never empty");
        if character != ',' {
            last.push(character);
        } else if characters.peek() == Some(&',') {
            characters.next();
            last.push(',');
        } else {
            parts.push(String::new());
        }
    }
    // A comma at the end is nothing more.
    if parts.len() > 1 && parts.last().is_some_and(String::is_empty) {
        parts.pop();
    }
    parts
}

/// A size as QEMU writes it; without a unit it is so many of `unit` bytes.
pub(crate) fn size(text: &str, unit: u64) -> Option<u64> {
    let split = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    let (number, suffix) = text.split_at(split);
    let scale = match suffix.to_ascii_lowercase().as_str() {
        "" => unit,
        "b" => 1,
        "k" => 1 << 10,
        "m" => 1 << 20,
        "g" => 1 << 30,
        "t" => 1 << 40,
        _ => return None,
    };
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(scale);
    }
    let plain = number.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    let value = number.parse::<f64>().ok().filter(|_| plain)? * scale as f64;
    (value < (1_u64 << 53) as f64).then_some(value as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(text: &str, implied: &str) -> Vec<(String, String)> {
        match Options::parse(text, implied).expect("parsed") {
            Options::Pairs(pairs) => pairs,
            Options::Json(_) => panic!("JSON"),
        }
    }

    #[test]
    fn values_are_split_as_qemu_splits_them() {
        let owned = |pairs: &[(&str, &str)]| -> Vec<(String, String)> {
            pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
        };
        assert_eq!(pairs("q35", "type"), owned(&[("type", "q35")]));
        assert_eq!(
            pairs("q35,accel=kvm:tcg", "type"),
            owned(&[("type", "q35"), ("accel", "kvm:tcg")])
        );
        assert_eq!(pairs("type=pc", "type"), owned(&[("type", "pc")]));
        assert_eq!(pairs("file=a,,b,if=none", "x"), owned(&[("file", "a,b"), ("if", "none")]));
        assert_eq!(pairs("a=x,,,b=1", "x"), owned(&[("a", "x,"), ("b", "1")]));
        assert_eq!(
            pairs("socket,id=c,server,nowait", "backend"),
            owned(&[("backend", "socket"), ("id", "c"), ("server", "on"), ("wait", "off")])
        );
        // Not the short form of "de=off".
        assert_eq!(pairs("x,node", "t"), owned(&[("t", "x"), ("node", "on")]));
        assert_eq!(pairs("a=b=c,", "x"), owned(&[("a", "b=c")]));
        assert_eq!(pairs("", "x"), owned(&[("x", "")]));
    }

    #[test]
    fn what_was_split_is_put_together_again() {
        for text in ["type=q35,accel=tcg", "qom-type=memory-backend-ram,id=m,,n,size=1G", "a=x,,"] {
            let options = Options::parse(text, "type").expect("parsed");
            assert_eq!(options.to_string(), text);
        }
        let mut options = Options::parse("virtio-balloon-pci,id=b", "driver").expect("parsed");
        options.set("free-page-reporting", "on");
        options.set("id", "x,y");
        let text = "driver=virtio-balloon-pci,id=x,,y,free-page-reporting=on";
        assert_eq!(options.to_string(), text);
        assert!(options.is_on("free-page-reporting") && !options.is_on("id"));
    }

    #[test]
    fn json_is_read_and_written() {
        let text = r#"{"driver":"virtio-balloon-pci","id":"b","free-page-reporting":false}"#;
        let mut options = Options::parse(text, "driver").expect("parsed");
        assert_eq!(options.get("driver").as_deref(), Some("virtio-balloon-pci"));
        assert!(!options.is_on("free-page-reporting"));
        options.set("free-page-reporting", "on");
        assert!(options.to_string().contains(r#""free-page-reporting":true"#));
        let refused = Options::parse("{\"driver\":", "driver").expect_err("cut off");
        assert!(refused.to_string().contains("is not JSON"), "{refused}");
        let deep = "{\"a\":".repeat(5000);
        assert!(Options::parse(&deep, "driver").is_err());
    }

    #[test]
    fn sizes_have_qemus_units() {
        for (text, unit, bytes) in [
            ("512", 1 << 20, Some(512 << 20)),
            ("512", 1, Some(512)),
            ("512M", 1, Some(512 << 20)),
            ("4G", 1 << 20, Some(4 << 30)),
            ("4g", 1 << 20, Some(4 << 30)),
            ("1.5G", 1, Some(3 << 29)),
            ("1T", 1, Some(1 << 40)),
            ("100b", 1, Some(100)),
            ("1GiB", 1, None),
            ("-1G", 1, None),
            ("1e3", 1, None),
            ("inf", 1, None),
            ("99999999999999999999", 1, None),
            ("99999999999G", 1, None),
            ("", 1, None),
        ] {
            assert_eq!(size(text, unit), bytes, "{text}");
        }
    }

    #[test]
    fn any_text_is_parsed_or_refused() {
        // A small generator of nonsense: QEMU's characters in any order.
        let alphabet: Vec<char> = "a=,,{}\"[]:no 0ä\\".chars().collect();
        let mut state = 1_u64;
        for _ in 0..20_000 {
            let mut text = String::new();
            for _ in 0..(state >> 60) {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                text.push(alphabet[(state >> 33) as usize % alphabet.len()]);
            }
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            if let Ok(options) = Options::parse(&text, "type") {
                // A comma in a key QEMU could not write either.
                if matches!(&options, Options::Pairs(p) if p.iter().any(|(k, _)| k.contains(','))) {
                    continue;
                }
                let again = Options::parse(&options.to_string(), "type");
                assert_eq!(again.as_ref(), Ok(&options), "{text:?}");
            }
        }
    }
}
