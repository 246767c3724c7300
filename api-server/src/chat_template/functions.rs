//! What chat templates call beside Jinja itself: `raise_exception`, `strftime_now`, `tojson` as
//! Hugging Face's `apply_chat_template` defines them, and the methods of Python's own types.

use std::fmt;
use std::io;
use std::sync::Arc;

use minijinja::value::{Kwargs, Value};
use minijinja::{Environment, Error, ErrorKind, State};
use pawl_shared::clock::Clock;
use serde::Serialize;
use serde_json::ser::{CompactFormatter, Formatter, PrettyFormatter, Serializer};

/// Bytes that `strftime_now` may write.
const TIME_BYTES_MAX: usize = 256;

pub fn add(environment: &mut Environment<'static>, clock: Arc<dyn Clock>) {
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", move |format: &str| {
        let text = strftime(format, clock.wall().0);
        text.ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "strftime_now: unknown format"))
    });
    environment.add_filter("tojson", tojson);
}

/// `{% generation %}` marks the assistant's part of a training text. To a prompt it means nothing,
/// and Jinja does not know it: it becomes a condition that always holds, which keeps the marks'
/// whitespace control.
pub fn without_generation_marks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at + 2);
        out.push_str(before);
        let Some(end) = tag.find("%}") else {
            rest = tag;
            break;
        };
        let (inner, after) = tag.split_at(end);
        match inner.trim_matches(['-', '+', ' ', '\n', '\t']) {
            "generation" => out.push_str(&inner.replacen("generation", "if true", 1)),
            "endgeneration" => out.push_str(&inner.replacen("endgeneration", "endif", 1)),
            _ => out.push_str(inner),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

/// A template's own refusal, in its own words.
#[derive(Debug)]
struct Raised(String);

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, "the template refused")
        .with_source(Raised(message)))
}

/// The words of a `raise_exception` that ended a rendering.
pub fn raised(error: &Error) -> Option<&str> {
    let mut source = std::error::Error::source(error);
    while let Some(error) = source {
        if let Some(Raised(message)) = error.downcast_ref() {
            return Some(message);
        }
        source = error.source();
    }
    None
}

/// JSON as Python's `json.dumps` writes it: a blank after commas and colons, nothing escaped that
/// need not be (Jinja's own filter escapes for HTML).
fn tojson(
    state: &State<'_, '_>,
    value: &Value,
    indent: Option<usize>,
    kwargs: Kwargs,
) -> Result<Value, Error> {
    let indent = match indent {
        Some(indent) => Some(indent),
        None => kwargs.get::<Option<usize>>("indent")?,
    };
    let ascii = kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    // Keys come in the order they were sent; sorting them would only be asked for by a template.
    let _ = kwargs.get::<Option<bool>>("sort_keys")?;
    let _ = kwargs.get::<Option<Value>>("separators")?;
    kwargs.assert_all_used()?;
    let mut bytes = Vec::new();
    let written = match indent {
        None => write_json(value, &mut bytes, Python { inner: CompactFormatter, ascii }),
        Some(width) => {
            let blanks = " ".repeat(width.min(16));
            let inner = PrettyFormatter::with_indent(blanks.as_bytes());
            let mut serializer = Serializer::with_formatter(&mut bytes, inner);
            value.serialize(&mut serializer)
        }
    };
    written.map_err(|error| {
        Error::new(ErrorKind::InvalidOperation, "tojson: not a JSON value").with_source(error)
    })?;
    state.consume_fuel(bytes.len() as u64 / 8)?;
    Ok(Value::from(String::from_utf8(bytes).expect("JSON is text")))
}

fn write_json(
    value: &Value,
    bytes: &mut Vec<u8>,
    formatter: Python,
) -> Result<(), serde_json::Error> {
    let mut serializer = Serializer::with_formatter(bytes, formatter);
    value.serialize(&mut serializer)
}

struct Python {
    inner: CompactFormatter,
    ascii: bool,
}

impl Formatter for Python {
    fn begin_array_value<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }

    fn write_string_fragment<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        fragment: &str,
    ) -> io::Result<()> {
        if !self.ascii || fragment.is_ascii() {
            return self.inner.write_string_fragment(writer, fragment);
        }
        let mut units = [0_u16; 2];
        for character in fragment.chars() {
            if character.is_ascii() {
                writer.write_all(&[character as u8])?;
            } else {
                for unit in character.encode_utf16(&mut units) {
                    write!(writer, "\\u{unit:04x}")?;
                }
            }
        }
        Ok(())
    }
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] =
    ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];

/// The usual codes of C's `strftime`, in UTC: a prompt should not depend on the server's time zone.
/// `None` where a code is not known.
pub fn strftime(format: &str, unix_seconds: f64) -> Option<String> {
    let seconds = unix_seconds.max(0.0) as u64;
    let (days, in_day) = (seconds / 86_400, seconds % 86_400);
    let (hour, minute, second) = (in_day / 3_600, in_day / 60 % 60, in_day % 60);
    let (year, month, day) = civil(days);
    let weekday = WEEKDAYS[((days + 3) % 7) as usize];
    let month_name = MONTHS[(month - 1) as usize];
    let day_of_year = days - days_before_year(year) + 1;
    let twelve = if hour % 12 == 0 { 12 } else { hour % 12 };
    let mut out = String::new();
    let mut codes = format.chars();
    while let Some(character) = codes.next() {
        if out.len() > TIME_BYTES_MAX {
            return None;
        }
        if character != '%' {
            out.push(character);
            continue;
        }
        let mut code = codes.next()?;
        let bare = code == '-';
        if bare {
            code = codes.next()?;
        }
        let number = |value: u64, width: usize| {
            if bare { value.to_string() } else { format!("{value:0width$}") }
        };
        let text = match code {
            'Y' => year.to_string(),
            'y' => number(year % 100, 2),
            'm' => number(month, 2),
            'd' => number(day, 2),
            'e' => format!("{day:2}"),
            'H' => number(hour, 2),
            'I' => number(twelve, 2),
            'M' => number(minute, 2),
            'S' => number(second, 2),
            'j' => number(day_of_year, 3),
            'B' => month_name.to_owned(),
            'b' | 'h' => month_name[..3].to_owned(),
            'A' => weekday.to_owned(),
            'a' => weekday[..3].to_owned(),
            'p' => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            'F' => format!("{year}-{month:02}-{day:02}"),
            'T' => format!("{hour:02}:{minute:02}:{second:02}"),
            'Z' => "UTC".to_owned(),
            'z' => "+0000".to_owned(),
            's' => seconds.to_string(),
            '%' => "%".to_owned(),
            _ => return None,
        };
        out.push_str(&text);
    }
    Some(out)
}

/// Year, month and day of the day `days` after 1 January 1970.
fn civil(days: u64) -> (u64, u64, u64) {
    // A lower bound, since no year has more than 366 days; the loop closes the gap.
    let mut year = 1970 + days / 366;
    while days_before_year(year + 1) <= days {
        year += 1;
    }
    let mut left = days - days_before_year(year);
    for month in 1..=12 {
        let length = match month {
            2 if is_leap(year) => 29,
            2 => 28,
            4 | 6 | 9 | 11 => 30,
            _ => 31,
        };
        if left < length {
            return (year, month, left + 1);
        }
        left -= length;
    }
    unreachable!("a year has no more days than its months")
}

fn is_leap(year: u64) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

/// Days from 1 January 1970 to 1 January of `year`.
fn days_before_year(year: u64) -> u64 {
    let leaps = |year: u64| year / 4 - year / 100 + year / 400;
    (year - 1970) * 365 + leaps(year - 1) - leaps(1969)
}
