//! The registry behind `/metrics`. The only folder that names the metrics crate.

/// The text formats `/metrics` can be given in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// `text/plain; version=0.0.4`: the default.
    Text004,
    /// `application/openmetrics-text; version=1.0.0`: only when asked for.
    OpenMetrics,
}

/// Why a request was refused before it reached the core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdmissionReason {
    /// Too many requests open or queued.
    QueueFull,
    /// The server is stopping.
    Draining,
    /// The core is away or hung.
    EngineUnavailable,
}

/// One answered HTTP request.
#[derive(Clone, Copy, Debug)]
pub struct HttpObservation {
    /// As received; unknown ones are counted as `OTHER`.
    pub method: &'static str,
    /// The route's template, never the path; `none` where no route matched.
    pub handler: &'static str,
    /// The status sent.
    pub status: u16,
    /// From the head of the request to the end of the answer.
    pub seconds: f64,
    /// Of the request's body.
    pub request_bytes: u64,
    /// Of the answer's body.
    pub response_bytes: u64,
}

/// Every series of this process.
#[derive(Debug, Default)]
pub struct Metrics {
    _private: (),
}

impl Metrics {
    /// A request's head was read.
    pub fn http_started(&self) {}

    /// A request was answered (or its client left: then with what was sent so far).
    pub fn http_observed(&self, observation: &HttpObservation) {
        let _ = observation;
    }

    /// A request was refused before it reached the core.
    pub fn admission_rejected(&self, reason: AdmissionReason) {
        let _ = reason;
    }

    /// Turns recording on or off; the token stream is the same either way.
    pub fn set_recording(&self, on: bool) {
        let _ = on;
    }

    /// Whether anything is recorded.
    #[must_use]
    pub fn recording(&self) -> bool {
        true
    }

    /// The page: content type and body.
    #[must_use]
    pub fn render(&self, format: Format) -> (&'static str, Vec<u8>) {
        let _ = format;
        ("text/plain; version=0.0.4; charset=utf-8", Vec::new())
    }
}
