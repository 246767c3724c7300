//! Calls of the core's methods by name, each with an answer.

use pawl_shared::protocol::{ClientMessage, UtilityCall, Value};
use tokio::sync::oneshot;

use super::{Inner, State, SubmitError, UtilityError};

/// Calls that wait for an answer at most; beyond, a call is refused.
pub(super) const CALLS_MAX: usize = 1024;

impl Inner {
    /// Sends a call and returns its id, which the reply bears too.
    pub(super) fn send_call(
        &self,
        state: &mut State,
        method: &str,
        args: Vec<Value>,
    ) -> Result<u64, UtilityError> {
        let Some(session) = &state.session else {
            let SubmitError::Unavailable { reason } = self.unavailable() else {
                unreachable!("unavailable() gives no other")
            };
            return Err(UtilityError::Unavailable { reason });
        };
        let call_id = state.next_call;
        state.next_call += 1;
        let client_index = session.client_index;
        let call = UtilityCall { client_index, call_id, method: method.to_string(), args };
        match self.sender.try_send(ClientMessage::Utility(call).encode()) {
            Ok(()) => Ok(call_id),
            Err(refused) => Err(UtilityError::Unavailable { reason: refused.to_string() }),
        }
    }

    pub(super) async fn call(&self, method: &str, args: Vec<Value>) -> Result<Value, UtilityError> {
        let (answer, answered) = oneshot::channel();
        let call_id = {
            let mut state = self.state();
            if state.calls.len() >= CALLS_MAX {
                let reason = format!("{CALLS_MAX} calls wait for an answer already");
                return Err(UtilityError::Unavailable { reason });
            }
            let call_id = self.send_call(&mut state, method, args)?;
            state.calls.insert(call_id, answer);
            call_id
        };
        // Whoever stops waiting, by time or by being dropped, takes the entry along.
        let _forget = ForgetCall { inner: self, call_id };
        let after = self.config.utility_timeout;
        match tokio::time::timeout(after, answered).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) => Err(UtilityError::Unavailable { reason: "it has gone".to_string() }),
            Err(_) => Err(UtilityError::Timeout { method: method.to_string(), after }),
        }
    }
}

struct ForgetCall<'a> {
    inner: &'a Inner,
    call_id: u64,
}

impl Drop for ForgetCall<'_> {
    fn drop(&mut self) {
        self.inner.state().calls.remove(&self.call_id);
    }
}
