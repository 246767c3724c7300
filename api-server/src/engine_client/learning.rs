//! How a client learns what its core serves: it asks the core, and where that does not help, again.
//!
//! A state machine like the rest: replies and ticks go in, and what is real work (building a
//! tokenizer) comes out as a [`ModelBuild`] for whoever drives it.

use std::sync::Arc;
use std::time::Duration;

use pawl_shared::clock::Stamp;
use pawl_shared::model_card::ModelCard;
use pawl_shared::protocol::{ReadyResponse, Value};

use super::{EngineStatus, Inner, ServedModel, State, UtilityError, served_model};

/// How long to wait before the core is asked for its model again.
const ASK_AGAIN: Duration = Duration::from_secs(5);
const METHOD: &str = "get_model_card";

/// The way to the model of the session; it ends when the model is known or the session is over.
pub(super) struct Learning {
    engine_index: u32,
    ready: ReadyResponse,
    step: Step,
}

enum Step {
    /// The core owes an answer.
    Asked { call_id: u64, until: Stamp },
    /// A [`ModelBuild`] is being run.
    Building,
    /// It did not work; the core is asked again then.
    Waiting { until: Stamp },
}

impl Learning {
    /// Whether this call is the question for the model.
    pub fn asked(&self, id: u64) -> bool {
        matches!(self.step, Step::Asked { call_id, .. } if call_id == id)
    }
}

/// A model that has been told and whose tokenizer is still to be built: up to a second of work.
pub(super) struct ModelBuild {
    epoch: u64,
    card: ModelCard,
    told: Option<Value>,
    names: Vec<String>,
    bound: u32,
}

/// What came of a [`ModelBuild`].
pub(super) struct BuiltModel {
    epoch: u64,
    told: Option<Value>,
    model: Result<Arc<ServedModel>, String>,
}

impl ModelBuild {
    /// Does the work.
    pub fn run(self) -> BuiltModel {
        let Self { epoch, card, told, names, bound } = self;
        let model = ServedModel::new(card, &names, bound);
        let model =
            model.map(Arc::new).map_err(|error| format!("its tokenizer cannot be used: {error}"));
        BuiltModel { epoch, told, model }
    }

    /// For [`Inner::built`], where the work came to nothing.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }
}

impl BuiltModel {
    /// The work of `epoch` ended in a panic.
    pub fn failed(epoch: u64, error: &dyn std::fmt::Display) -> Self {
        let model = Err(format!("its tokenizer could not be built: {error}"));
        Self { epoch, told: None, model }
    }
}

impl Inner {
    /// A session has begun: asks for its model.
    pub(super) fn begin_learning(
        &self,
        state: &mut State,
        engine_index: u32,
        ready: ReadyResponse,
        now: Stamp,
    ) -> Option<ModelBuild> {
        state.learning = Some(Learning { engine_index, ready, step: Step::Building });
        self.ask(state, now)
    }

    fn ask(&self, state: &mut State, now: Stamp) -> Option<ModelBuild> {
        match self.send_call(state, METHOD, Vec::new()) {
            Ok(call_id) => {
                let until = now + self.config.utility_timeout;
                state.learning.as_mut()?.step = Step::Asked { call_id, until };
                None
            }
            Err(error) => self.told(state, Err(error.to_string()), now),
        }
    }

    /// The core has answered the question for its model.
    pub(super) fn answered(
        &self,
        state: &mut State,
        answer: Result<Value, String>,
        now: Stamp,
    ) -> Option<ModelBuild> {
        let told = match answer {
            Ok(Value::Nil) => Err("it tells no model card".to_string()),
            Ok(card) => Ok(card),
            Err(why) => Err(UtilityError::Failed(why).to_string()),
        };
        self.told(state, told, now)
    }

    /// Gives up waiting for an answer, or asks again, where it is time to.
    pub(super) fn learn_on(&self, state: &mut State, now: Stamp) -> Option<ModelBuild> {
        match state.learning.as_ref()?.step {
            Step::Asked { until, .. } if now >= until => {
                let after = self.config.utility_timeout;
                let error = UtilityError::Timeout { method: METHOD.to_string(), after };
                self.told(state, Err(error.to_string()), now)
            }
            Step::Waiting { until } if now >= until => self.ask(state, now),
            _ => None,
        }
    }

    fn told(
        &self,
        state: &mut State,
        told: Result<Value, String>,
        now: Stamp,
    ) -> Option<ModelBuild> {
        let epoch = state.session.as_ref()?.epoch;
        let learning = state.learning.as_mut()?;
        learning.step = Step::Building;
        let bound = u32::try_from(learning.ready.max_model_len).unwrap_or(u32::MAX);
        let names = self.config.served_model_names.clone();
        let (card, told) = match (told, &self.config.local_card) {
            (Ok(told), _) => {
                if let Some(model) = same_model(state, &told, bound) {
                    self.serve(state, model, Some(told));
                    return None;
                }
                match ModelCard::from_value(&told) {
                    Ok(card) => (card, Some(told)),
                    Err(error) => {
                        let reason = format!("its model card cannot be used: {error}");
                        self.not_learned(state, reason, now);
                        return None;
                    }
                }
            }
            (Err(why), Some(local)) => {
                tracing::info!(why, "the core tells no model; the one given here is used");
                (local.clone(), None)
            }
            (Err(why), None) => {
                let reason = format!(
                    "the core does not tell its model ({why}); start the api-server with the \
                     model's path"
                );
                self.not_learned(state, reason, now);
                return None;
            }
        };
        Some(ModelBuild { epoch, card, told, names, bound })
    }

    /// The work that was given out is done; of no use if the session is over.
    pub(super) fn built(&self, built: BuiltModel) {
        let now = self.config.clock.now();
        let mut state = self.state();
        if state.session.as_ref().is_none_or(|session| session.epoch != built.epoch) {
            return;
        }
        match built.model {
            Ok(model) => self.serve(&mut state, model, built.told),
            Err(reason) => self.not_learned(&mut state, reason, now),
        }
    }

    fn not_learned(&self, state: &mut State, reason: String, now: Stamp) {
        // A core that stops tells nothing any more, and that has been told already.
        if state.session.as_ref().is_some_and(|session| session.stopping) {
            return;
        }
        tracing::error!(reason, "requests are refused");
        if let Some(learning) = &mut state.learning {
            learning.step = Step::Waiting { until: now + ASK_AGAIN };
        }
        self.set_status(EngineStatus::Down { reason });
    }

    fn serve(&self, state: &mut State, model: Arc<ServedModel>, told: Option<Value>) {
        let (Some(session), Some(learning)) = (state.session.as_mut(), state.learning.take())
        else {
            return;
        };
        session.serving = true;
        let status = session.status();
        let engine_index = learning.engine_index;
        let engine = self.config.metrics.engine(model.name(), engine_index, model.max_model_len);
        state.handler.set_engine(engine, engine_index);
        tracing::info!(model = model.name(), max_model_len = model.max_model_len, "serving");
        state.model = Some(model);
        state.told_card = told;
        self.set_status(status);
    }
}

/// The model of the epoch before, if the core has told the very same again.
fn same_model(state: &State, told: &Value, bound: u32) -> Option<Arc<ServedModel>> {
    let model = state.model.as_ref().filter(|_| state.told_card.as_ref() == Some(told))?;
    (model.max_model_len == served_model::length(&model.card, bound)).then(|| model.clone())
}
