//! The standard health service: SERVING while the core serves and new work is taken.

use std::sync::Arc;

use pawl_shared::shutdown::Shutdown;
use tonic_health::pb::health_server::HealthServer;
use tonic_health::server::{HealthReporter, HealthService};

use crate::engine_client::EngineStatus;
use crate::serving::App;

/// The names that may be asked after; the empty one is the server as a whole.
const SERVICES: [&str; 5] =
    ["", "pawl.Inference", "pawl.Control", "vllm.Inference", "vllm.Control"];

/// What is told of this server.
pub struct Health {
    reporter: HealthReporter,
}

impl Health {
    /// NOT_SERVING until [`Health::follow`] says otherwise.
    pub async fn new() -> Self {
        let health = Self { reporter: HealthReporter::new() };
        health.tell(false).await;
        health
    }

    /// The service that answers.
    pub fn service(&self) -> HealthServer<HealthService> {
        HealthServer::new(HealthService::from_health_reporter(self.reporter.clone()))
    }

    /// Tells how the core is doing, for ever. Once a stop is asked for nothing is served.
    pub async fn follow(&self, app: Arc<App>, shutdown: Shutdown) {
        let mut status = app.engine.watch();
        // Telling the same again would wake whoever watches.
        let mut told = false;
        loop {
            let up = *status.borrow_and_update() == EngineStatus::Up;
            let stopping = shutdown.is_requested();
            let serving = up && !stopping;
            if serving != told {
                self.tell(serving).await;
                told = serving;
            }
            tokio::select! {
                changed = status.changed() => if changed.is_err() {
                    // The engine's client is gone, and its core with it.
                    return self.tell(false).await;
                },
                () = shutdown.requested(), if !stopping => {}
            }
        }
    }

    async fn tell(&self, serving: bool) {
        use tonic_health::ServingStatus::{NotServing, Serving};
        let status = if serving { Serving } else { NotServing };
        for service in SERVICES {
            self.reporter.set_service_status(service, status).await;
        }
    }
}
