//! CRIU's images as rows of protobuf messages, each behind its length, after two
//! words that say what they are. What nobody here knows passes unchanged.

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Value {
    Number(u64),
    Bytes(Vec<u8>),
    /// Four or eight bytes, as they are.
    Fixed(Vec<u8>),
}

/// A protobuf message: its fields, in order.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Message(pub(crate) Vec<(u64, Value)>);

pub(crate) fn take<'a>(bytes: &mut &'a [u8], count: usize) -> Option<&'a [u8]> {
    let (taken, rest) = bytes.split_at_checked(count)?;
    *bytes = rest;
    Some(taken)
}

fn take_number(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let byte = take(bytes, 1)?[0];
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

fn put_number(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

impl Message {
    pub(crate) fn parse(mut bytes: &[u8]) -> Option<Self> {
        let mut fields = Vec::new();
        while !bytes.is_empty() {
            let key = take_number(&mut bytes)?;
            let value = match key & 7 {
                0 => Value::Number(take_number(&mut bytes)?),
                1 => Value::Fixed(take(&mut bytes, 8)?.to_vec()),
                2 => {
                    let length = usize::try_from(take_number(&mut bytes)?).ok()?;
                    Value::Bytes(take(&mut bytes, length)?.to_vec())
                }
                5 => Value::Fixed(take(&mut bytes, 4)?.to_vec()),
                _ => return None,
            };
            fields.push((key >> 3, value));
        }
        Some(Self(fields))
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        for (name, value) in &self.0 {
            match value {
                Value::Number(number) => {
                    put_number(&mut out, name << 3);
                    put_number(&mut out, *number);
                }
                Value::Bytes(bytes) => {
                    put_number(&mut out, name << 3 | 2);
                    put_number(&mut out, bytes.len() as u64);
                    out.extend(bytes);
                }
                Value::Fixed(bytes) => {
                    put_number(&mut out, name << 3 | if bytes.len() == 4 { 5 } else { 1 });
                    out.extend(bytes);
                }
            }
        }
        out
    }

    pub(crate) fn number(&self, wanted: u64) -> Option<u64> {
        self.0.iter().find_map(|(name, value)| match value {
            Value::Number(number) if *name == wanted => Some(*number),
            _ => None,
        })
    }

    /// All values of a repeated field.
    pub(crate) fn numbers(&self, wanted: u64) -> Vec<u32> {
        let values = self.0.iter().filter_map(|(name, value)| match value {
            Value::Number(number) if *name == wanted => Some(*number as u32),
            _ => None,
        });
        values.collect()
    }

    pub(crate) fn bytes_of(&self, wanted: u64) -> Option<&[u8]> {
        self.0.iter().find_map(|(name, value)| match value {
            Value::Bytes(bytes) if *name == wanted => Some(bytes.as_slice()),
            _ => None,
        })
    }

    pub(crate) fn message(&self, wanted: u64) -> Option<Self> {
        self.0.iter().find_map(|(name, value)| match value {
            Value::Bytes(bytes) if *name == wanted => Self::parse(bytes),
            _ => None,
        })
    }

    /// Puts `value` in place of the field, or behind all others.
    pub(crate) fn set(&mut self, wanted: u64, value: Value) {
        match self.0.iter_mut().find(|(name, _)| *name == wanted) {
            Some((_, old)) => *old = value,
            None => self.0.push((wanted, value)),
        }
    }
}

/// Bytes at the start of an image: images of the common kind, and the kind of this
/// one (CRIU's `magic.h`).
const HEAD_BYTES: usize = 8;

/// An image's first two words and its messages; `None`: it is none.
pub(crate) fn rows(image: &[u8]) -> Option<(&[u8], Vec<Message>)> {
    let (head, mut rest) = image.split_at_checked(HEAD_BYTES)?;
    let mut found = Vec::new();
    while !rest.is_empty() {
        let length = u32::from_le_bytes(take(&mut rest, 4)?.try_into().ok()?);
        found.push(Message::parse(take(&mut rest, length as usize)?)?);
    }
    Some((head, found))
}

/// The image of these messages.
pub(crate) fn image_of(head: &[u8], rows: &[Message]) -> Vec<u8> {
    let mut out = head.to_vec();
    for row in rows {
        let bytes = row.bytes();
        out.extend((bytes.len() as u32).to_le_bytes());
        out.extend(bytes);
    }
    out
}
