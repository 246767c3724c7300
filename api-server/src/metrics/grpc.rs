//! The `grpc_*` families: every call by method and code, under the names that gRPC servers in other
//! languages use for theirs, so that their dashboards fit.

use prometheus::{HistogramVec, IntCounterVec};

use super::register::{Registrar, Resolve};
use super::table;

/// What a call is counted under.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrpcMethod {
    /// `unary`, `server_stream` or `bidi_stream`.
    pub kind: &'static str,
    /// With its package; `none` where there is no such method.
    pub service: &'static str,
    /// Without its service; `none` where there is no such method.
    pub method: &'static str,
}

/// One call that has ended.
#[derive(Clone, Copy, Debug)]
pub struct GrpcObservation {
    /// Which method.
    pub method: GrpcMethod,
    /// `OK`, `InvalidArgument`, …
    pub code: &'static str,
    /// From the head of the call to its end.
    pub seconds: f64,
}

pub(super) struct GrpcHandles {
    started: IntCounterVec,
    handled: IntCounterVec,
    handling: HistogramVec,
}

impl GrpcHandles {
    pub(super) fn register(at: &Registrar<'_>) -> Self {
        Self {
            started: at.counter(&table::GRPC_STARTED),
            handled: at.counter(&table::GRPC_HANDLED),
            handling: at.histogram(&table::GRPC_HANDLING),
        }
    }

    pub(super) fn prime(&self, methods: &[GrpcMethod]) {
        for GrpcMethod { kind, service, method } in methods {
            self.started.at(&[kind, service, method]);
            self.handled.at(&[kind, service, method, "OK"]);
            self.handling.at(&[kind, service, method]);
        }
    }

    pub(super) fn started(&self, GrpcMethod { kind, service, method }: GrpcMethod) {
        self.started.at(&[kind, service, method]).inc();
    }

    pub(super) fn observe(&self, seen: &GrpcObservation) {
        let GrpcMethod { kind, service, method } = seen.method;
        self.handled.at(&[kind, service, method, seen.code]).inc();
        self.handling.at(&[kind, service, method]).observe(seen.seconds);
    }
}
