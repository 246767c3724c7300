//! The HTTP side: routes, and what stands around them. What an answer takes beside HTTP is in
//! [`crate::serving`].
//!
//! | route | key needed |
//! |---|---|
//! | `POST /v1/completions`, `/v1/chat/completions` | yes |
//! | `GET /v1/models`, `/v1/models/NAME` | yes |
//! | `POST /tokenize`, `/detokenize` | yes |
//! | `GET /health`, `/ready`, `/version`, `/load`, `/metrics`; `GET` and `POST /ping` | no |
//!
//! Keys (`--api-key`, sent as `Authorization: Bearer …`) are asked for where a route has matched,
//! never by the look of a path. The admin listener ([`crate::admin`]) asks for none: keep its port
//! to yourself.
//!
//! - `completions`, `chat`, `tokens`, `models`, `probes`: one file per group of routes;
//! - `ids`: the headers of one request;
//! - `sse`: a stream of events from a running request;
//! - `observe`, `auth`, `body`, `error`: around every route;
//! - `listener`, `io`: connections and their bounds.

mod auth;
mod body;
mod chat;
mod completions;
mod error;
mod ids;
pub mod io;
pub mod listener;
mod models;
mod observe;
mod probes;
mod sse;
#[cfg(test)]
mod tests;
mod tokens;

pub use auth::{has_key, wrong_key};
pub use body::JsonBytes;
pub use error::{method_not_allowed, route_not_found};
pub use ids::TIMING;
pub use probes::{health, load, own_metrics, ready, version};

use std::sync::Arc;

use axum::Router;
use axum::middleware::from_fn_with_state;
use axum::routing::{MethodRouter, any, get, post};

use crate::serving::{App, shutting_down};
use observe::Route;

/// The routes of the main port.
pub fn router(app: Arc<App>) -> Router {
    let counted = |template| Route { template, counted: true };
    let probe = |template| Route { template, counted: false };
    let routes: [(Route, bool, MethodRouter<Arc<App>>); 12] = [
        (counted("/v1/completions"), true, post(completions::completions)),
        (counted("/v1/chat/completions"), true, post(chat::chat_completions)),
        (counted("/v1/models"), true, get(models::models)),
        // Names may hold slashes.
        (counted("/v1/models/{*name}"), true, get(models::model)),
        (counted("/tokenize"), true, post(tokens::tokenize)),
        (counted("/detokenize"), true, post(tokens::detokenize)),
        (probe("/health"), false, get(probes::health)),
        (probe("/ready"), false, get(probes::ready)),
        (probe("/ping"), false, get(probes::health).post(probes::health)),
        (probe("/version"), false, get(probes::version)),
        (probe("/load"), false, get(probes::load)),
        (probe("/metrics"), false, get(probes::metrics)),
    ];
    let mut router = Router::new();
    for (route, keyed, methods) in routes {
        // The layers belong to the route, so that what they decide and count cannot depend on how a
        // path was written. The last one is the outermost.
        let mut methods = methods.fallback(method_not_allowed);
        if keyed {
            methods = methods.layer(from_fn_with_state(Arc::clone(&app), auth::require_key));
        }
        router = router.route(route.template, around(&app, route, methods));
    }
    let unknown = any(route_not_found);
    router
        .fallback_service(around(&app, Route::NONE, unknown).with_state(Arc::clone(&app)))
        .with_state(app)
}

fn around(app: &Arc<App>, route: Route, methods: MethodRouter<Arc<App>>) -> MethodRouter<Arc<App>> {
    methods
        .layer(from_fn_with_state(Arc::clone(app), auth::cross_origin))
        .layer(from_fn_with_state((Arc::clone(app), route), observe::observe))
}
