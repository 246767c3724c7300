//! Logs: one place that sets them up, the same for every process.
//!
//! Lines go to standard error, so that standard output stays free for a command's result.
//! `RUST_LOG` filters as everywhere in Rust; the transport crate logs through `log`, hence the
//! bridge.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::FormatTime;

/// How a log line is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// Standard error that never fails: when its reader is gone (`pawl serve 2>&1 | head`), lines are
/// lost. An error would come back as a panic in whichever thread happened to log.
struct LossyStderr;

impl std::io::Write for LossyStderr {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        let _ = std::io::stderr().write_all(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Wall-clock time of day in UTC with milliseconds.
struct UtcTime;

impl FormatTime for UtcTime {
    fn format_time(&self, w: &mut Writer<'_>) -> std::fmt::Result {
        let now =
            std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let (secs, millis) = (now.as_secs(), now.subsec_millis());
        let (days, rest) = (secs / 86_400, secs % 86_400);
        let (year, month, day) = civil_date(days as i64);
        let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
        write!(w, "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{millis:03}Z")
    }
}

/// The Gregorian date `days` days after 1970-01-01 (the era-based algorithm of Howard Hinnant's
/// `civil_from_days`).
fn civil_date(days: i64) -> (i64, u32, u32) {
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let day_of_era = shifted.rem_euclid(146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    (year_of_era + era * 400 + i64::from(month <= 2), month as u32, day as u32)
}

/// Whether `text` is a log level, or a filter as `RUST_LOG` takes them. There a single word that is
/// no level names a target, so that a mistyped level would silence everything else.
///
/// # Errors
/// What to write instead.
pub fn check_filter(text: &str) -> Result<(), String> {
    const LEVELS: &str = "off, error, warn, info, debug or trace";
    let is_level = |word: &str| word.parse::<LevelFilter>().is_ok();
    for part in text.split(',') {
        let level = part.rsplit_once('=').map_or(part, |(_, level)| level);
        if !is_level(level.trim()) || level.trim().is_empty() {
            return Err(format!(
                "{part:?} names no level; write {LEVELS}, or a filter such as \
                 info,pawl::request=warn"
            ));
        }
    }
    EnvFilter::try_new(text).map(|_| ()).map_err(|error| error.to_string())
}

/// Starts logging for this process. `filter` is what `RUST_LOG` falls back to.
/// A second call does nothing: tests may start several parts in one process.
pub fn init(format: LogFormat, filter: &str) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(filter));
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_timer(UtcTime)
        .with_writer(|| LossyStderr)
        .log_internal_errors(false)
        .with_ansi(std::io::stderr().is_terminal());
    // An error means that logging was set up before; the first set-up stands.
    let _ = match format {
        LogFormat::Text => builder.try_init(),
        LogFormat::Json => builder.json().try_init(),
    };
}

#[cfg(test)]
mod tests {
    use super::civil_date;

    #[test]
    fn dates_of_the_calendar() {
        assert_eq!(civil_date(0), (1970, 1, 1));
        assert_eq!(civil_date(11_016), (2000, 2, 29));
        assert_eq!(civil_date(20_787), (2026, 11, 30));
    }
}
