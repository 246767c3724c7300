//! Numbers as people write them: `8k` tokens, `2GiB`.

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

/// A count that may carry a suffix: `k` = 1,000, `K` = 1,024, and so on for `m`/`M` and `g`/`G`,
/// as in vLLM's `--max-model-len`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Count(pub u64);

impl FromStr for Count {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let (number, unit) = split_unit(text);
        let factor = match unit {
            "" => 1,
            "k" => 1_000,
            "K" => 1 << 10,
            "m" => 1_000_000,
            "M" => 1 << 20,
            "g" => 1_000_000_000,
            "G" => 1 << 30,
            _ => {
                return Err(format!(
                    "{text:?} is not a count; write 8192, 8k (8,000) or 8K (8,192)"
                ));
            }
        };
        scale(number, factor).map(Self).ok_or_else(|| format!("{text:?} is not a count"))
    }
}

/// A size in bytes: `1048576`, `64MiB`, `2GiB`, `2GB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

impl FromStr for Bytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let (number, unit) = split_unit(text);
        let factor = match unit.to_ascii_lowercase().as_str() {
            "" | "b" => 1,
            "k" | "kib" => 1 << 10,
            "kb" => 1_000,
            "m" | "mib" => 1 << 20,
            "mb" => 1_000_000,
            "g" | "gib" => 1 << 30,
            "gb" => 1_000_000_000,
            "t" | "tib" => 1 << 40,
            _ => return Err(format!("{text:?} is not a size; write bytes, or 64MiB, 2GiB, 2GB")),
        };
        scale(number, factor).map(Self).ok_or_else(|| format!("{text:?} is not a size in bytes"))
    }
}

fn split_unit(text: &str) -> (&str, &str) {
    let end = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    (number.trim(), unit)
}

/// `number` × `factor`, where `number` may have a fraction (`1.5k`); `None` if it is no such number
/// or does not fit.
fn scale(number: &str, factor: u64) -> Option<u64> {
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(factor);
    }
    let value: f64 = number.parse().ok()?;
    let scaled = value * factor as f64;
    ((0.0..1.8e19).contains(&scaled) && scaled.fract() == 0.0).then_some(scaled as u64)
}

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Serialize for Count {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(self.0)
    }
}

impl Serialize for Bytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts() {
        let check = |text: &str| text.parse::<Count>().ok().map(|c| c.0);
        assert_eq!(check("8192"), Some(8192));
        assert_eq!(check("8k"), Some(8_000));
        assert_eq!(check("8K"), Some(8_192));
        assert_eq!(check("1.5k"), Some(1_500));
        for bad in ["", "-1", "8q", "1.0001k", "99999999999G", "nan", "1e3"] {
            assert_eq!(check(bad), None, "{bad}");
        }
    }

    #[test]
    fn sizes() {
        let check = |text: &str| text.parse::<Bytes>().ok().map(|b| b.0);
        assert_eq!(check("64MiB"), Some(64 << 20));
        assert_eq!(check("2 GB"), Some(2_000_000_000));
        assert_eq!(check("0.5GiB"), Some(1 << 29));
        assert_eq!(check("12 parsecs"), None);
    }
}
