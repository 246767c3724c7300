//! `GetServerInfo`, `GetModelInfo`, `Abort`

use std::collections::HashSet;
use std::sync::Arc;

use pawl_proto::control_server::Control;
use pawl_proto::{
    AbortRequest, AbortResponse, GetModelInfoRequest, GetServerInfoRequest, ModelInfo,
    ParallelismInfo, ServerInfo,
};
use tonic::{Request, Response, Status};

use super::status::status;
use crate::openai::error::ApiError;
use crate::openai::fields::check_entries;
use crate::serving::App;

/// Changes when a client of the interface has to.
const API_VERSION: &str = "1";
/// Ids in one call to `Abort`.
const ABORT_IDS_MAX: usize = 1_024;
/// Bytes of one of them: a client's own 128, and what HTTP's answers put before and behind it.
const ABORT_ID_BYTES_MAX: usize = 160;

/// The methods that look, and end requests.
pub struct ControlCalls {
    app: Arc<App>,
    instance_id: String,
}

impl ControlCalls {
    pub fn new(app: Arc<App>) -> Self {
        Self { app, instance_id: uuid::Uuid::new_v4().simple().to_string() }
    }

    fn server_info(&self) -> Result<ServerInfo, ApiError> {
        let model = self.app.serving_model()?;
        let info = ServerInfo {
            engine_version: env!("CARGO_PKG_VERSION").into(),
            api_version: API_VERSION.into(),
            instance_id: self.instance_id.clone(),
            max_model_len: model.bounds.max_model_len,
            ..ServerInfo::default()
        };
        let Some(ready) = self.app.engine.ready() else { return Ok(info) };
        let small = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
        Ok(ServerInfo {
            parallelism: Some(ParallelismInfo {
                tensor_parallel_size: small(ready.tensor_parallel_size),
                pipeline_parallel_size: small(ready.pipeline_parallel_size),
                data_parallel_size: small(ready.data_parallel_size),
                data_parallel_rank: small(ready.data_parallel_rank),
                decode_context_parallel_size: small(ready.decode_context_parallel_size),
                world_size: ready.world_size,
            }),
            kv_block_size: small(ready.block_size),
            total_kv_blocks: ready.num_gpu_blocks,
            max_running_requests: ready.max_num_seqs,
            max_batched_tokens: ready.max_num_batched_tokens,
            ..info
        })
    }

    fn model_info(&self) -> Result<ModelInfo, ApiError> {
        let model = self.app.serving_model()?;
        let card = &model.served.card;
        let ends = card.eos_token_id.iter().chain(&card.stop_token_ids).copied();
        Ok(ModelInfo {
            model_id: model.name().into(),
            served_model_name: model.name().into(),
            served_model_aliases: model.served.names.iter().skip(1).cloned().collect(),
            supports_text_input: true,
            supports_token_ids_input: true,
            supports_lora: false,
            supports_multimodal: false,
            vocab_size: card.vocab_size,
            architecture: card.architecture.clone(),
            bos_token_id: card.bos_token_id,
            eos_token_ids: ends.collect(),
        })
    }

    fn abort_named(&self, ids: &[String]) -> Result<AbortResponse, ApiError> {
        const FIELD: &str = "request_ids";
        check_entries(FIELD, ids.len(), ABORT_IDS_MAX)?;
        if let Some(id) = ids.iter().find(|id| id.len() > ABORT_ID_BYTES_MAX) {
            let bytes = id.len();
            return Err(ApiError::invalid(
                FIELD,
                format!("an id has at most {ABORT_ID_BYTES_MAX} bytes, got one of {bytes}"),
            ));
        }
        let names: HashSet<&str> = ids.iter().map(String::as_str).collect();
        let count = self.app.engine.abort(&names);
        Ok(AbortResponse { num_aborted: u32::try_from(count).unwrap_or(u32::MAX) })
    }
}

#[tonic::async_trait]
impl Control for ControlCalls {
    async fn get_server_info(
        &self,
        _: Request<GetServerInfoRequest>,
    ) -> Result<Response<ServerInfo>, Status> {
        self.server_info().map(Response::new).map_err(|error| status(&error))
    }

    async fn get_model_info(
        &self,
        _: Request<GetModelInfoRequest>,
    ) -> Result<Response<ModelInfo>, Status> {
        self.model_info().map(Response::new).map_err(|error| status(&error))
    }

    async fn abort(
        &self,
        request: Request<AbortRequest>,
    ) -> Result<Response<AbortResponse>, Status> {
        let ids = &request.get_ref().request_ids;
        self.abort_named(ids).map(Response::new).map_err(|error| status(&error))
    }
}
