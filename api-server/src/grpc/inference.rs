//! `Generate`, `GenerateStream`

use std::pin::Pin;
use std::sync::Arc;

use axum::http::HeaderMap;
use futures::Stream;
use pawl_proto::inference_server::Inference;
use pawl_proto::{GenerateRequest, GenerateResponse};
use tonic::metadata::{AsciiMetadataValue, MetadataMap};
use tonic::{Request, Response, Status};

use super::answer::{Messages, append};
use super::request::{self, Told};
use super::status::status;
use crate::openai::error::{ApiError, ErrorCode};
use crate::openai::sampling::Bounds;
use crate::serving::completion::{self, Begun};
use crate::serving::generate::{REQUEST_ID, Running};
use crate::serving::{App, Arrival};

/// The methods that generate.
pub struct InferenceCalls {
    app: Arc<App>,
}

impl InferenceCalls {
    pub fn new(app: Arc<App>) -> Self {
        Self { app }
    }

    async fn begin(
        &self,
        request: Request<GenerateRequest>,
        stream: bool,
    ) -> Result<(String, Running, Messages), ApiError> {
        let (metadata, extensions, message) = request.into_parts();
        let arrival = extensions.get::<Arrival>().copied();
        let arrival = arrival.unwrap_or_else(|| Arrival(self.app.clock.now()));
        // The message's own id goes before the metadata's.
        let headers = match message.request_id.is_empty() {
            true => metadata.into_headers(),
            false => HeaderMap::new(),
        };
        let told = Told::new(message.response.as_ref());
        let read = move |bounds: &Bounds| request::read(message, stream, bounds);
        let begun = completion::begin(&self.app, arrival, &headers, "", read).await?;
        let Begun { id, mut prompts, running, .. } = begun;
        let prompt = prompts.pop().expect("a message has one prompt");
        Ok((id, running, Messages::new(told, prompt)))
    }
}

#[tonic::async_trait]
impl Inference for InferenceCalls {
    type GenerateStreamStream =
        Pin<Box<dyn Stream<Item = Result<GenerateResponse, Status>> + Send + 'static>>;

    async fn generate(
        &self,
        request: Request<GenerateRequest>,
    ) -> Result<Response<GenerateResponse>, Status> {
        let begun = self.begin(request, false).await;
        let (id, mut running, mut messages) = begun.map_err(|error| status(&error))?;
        let mut whole: Option<GenerateResponse> = None;
        while let Some(piece) = running.next().await {
            let piece = piece.map_err(|error| status(&error))?;
            let message = messages.message(piece, &running);
            match &mut whole {
                Some(whole) => append(whole, message),
                none => *none = Some(message),
            }
        }
        // `running` ends with a finish or an error, so there was at least one message.
        let whole = whole.ok_or_else(|| {
            status(&ApiError::new(ErrorCode::Internal, "the answer ended before it began"))
        })?;
        let mut response = Response::new(whole);
        tell(response.metadata_mut(), REQUEST_ID, &id);
        if let Some(timing) = running.timing_told() {
            tell(response.metadata_mut(), crate::http::TIMING, &timing);
        }
        Ok(response)
    }

    async fn generate_stream(
        &self,
        request: Request<GenerateRequest>,
    ) -> Result<Response<Self::GenerateStreamStream>, Status> {
        let begun = self.begin(request, true).await;
        let (id, running, messages) = begun.map_err(|error| status(&error))?;
        // Dropping the stream, as a call that is cancelled does, aborts the request.
        let pieces = futures::stream::unfold(Some((running, messages)), |state| async move {
            let (mut running, mut messages) = state?;
            match running.next().await? {
                Ok(piece) => {
                    let message = messages.message(piece, &running);
                    Some((Ok(message), Some((running, messages))))
                }
                Err(error) => Some((Err(status(&error)), None)),
            }
        });
        let mut response = Response::new(Box::pin(pieces) as Self::GenerateStreamStream);
        tell(response.metadata_mut(), REQUEST_ID, &id);
        Ok(response)
    }
}

fn tell(metadata: &mut MetadataMap, name: &'static str, value: &str) {
    let value = AsciiMetadataValue::try_from(value).expect("ids and timings are visible ASCII");
    metadata.insert(name, value);
}
