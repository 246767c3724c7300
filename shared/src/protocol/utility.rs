//! Calls by name, and their answers.

use super::wire::{ArrayItems, NAME_BYTES_MAX, Reader, Result as WireResult, Wire, Writer};
use super::{DecodeErrorKind as Kind, Value};

/// A utility call: `[client_index, call_id, method, args]`.
#[derive(Clone, Debug, PartialEq)]
pub struct UtilityCall {
    /// Who asks, as the caller says.
    pub client_index: u32,
    /// Echoed unchanged; often above 2^62.
    pub call_id: u64,
    /// The method's name.
    pub method: String,
    /// Positional arguments.
    pub args: Vec<Value>,
}

/// The answer: `[call_id, failure_message, result]`.
#[derive(Clone, Debug, PartialEq)]
pub struct UtilityReply {
    /// Of the call, unchanged. An engine's own notices (-1, -2) read as `u64::MAX` and one below:
    /// no caller counts that far, so they match no call.
    pub call_id: u64,
    /// Success with a value (`Value::Nil` for "no value"), or why it failed.
    pub result: Result<Value, String>,
}

impl Wire for UtilityCall {
    fn write(&self, w: &mut Writer) {
        w.array(4);
        self.client_index.write(w);
        self.call_id.write(w);
        w.text(&self.method);
        self.args.write(w);
    }

    fn read(r: &mut Reader<'_>) -> WireResult<Self> {
        let mut items = ArrayItems::open(r, 3)?;
        let call = Self {
            client_index: items.next(r, "client_index", Wire::read)?,
            call_id: items.next(r, "call_id", Wire::read)?,
            method: items.next(r, "method", |r| Ok(r.short_text(NAME_BYTES_MAX)?.to_owned()))?,
            args: items.next(r, "args", Wire::read)?,
        };
        items.refuse_rest()?;
        Ok(call)
    }
}

/// `[call_id, failure | nil, [type_info, value] | nil]`; a value is never sent bare.
impl Wire for UtilityReply {
    fn write(&self, w: &mut Writer) {
        w.array(3);
        self.call_id.write(w);
        match &self.result {
            Ok(value) => {
                w.nil();
                w.array(2);
                w.nil();
                value.write(w);
            }
            Err(failure) => {
                w.text(failure);
                w.nil();
            }
        }
    }

    fn read(r: &mut Reader<'_>) -> WireResult<Self> {
        let mut items = ArrayItems::open(r, 1)?;
        let call_id = items.next(r, "call_id", |r| {
            let before = r.clone();
            match r.integer::<i128>("a call id")? {
                // An engine's own notice: see the field.
                notice @ -2..0 => Ok(u64::MAX.wrapping_add_signed(notice as i64 + 1)),
                id => u64::try_from(id).map_err(|_| before.unexpected(Kind::Range, "a call id")),
            }
        })?;
        let failure: Option<String> = items.next(r, "failure_message", Wire::read)?;
        let value = items.next(r, "result", read_result)?;
        items.skip_rest(r)?;
        let result = failure.map_or(Ok(value.unwrap_or(Value::Nil)), Err);
        Ok(Self { call_id, result })
    }
}

fn read_result(r: &mut Reader<'_>) -> WireResult<Option<Value>> {
    if r.take_nil() {
        return Ok(None);
    }
    let before = r.clone();
    if r.array()? != 2 {
        return Err(before.unexpected(Kind::Type, "a result: [type_info, value]"));
    }
    // Type information says how Python rebuilds its own classes; the value is plain without it.
    r.skip()?;
    Value::read(r).map(Some)
}
