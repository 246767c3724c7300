//! Which requests live, and under which names.
//!
//! A wire id means something only together with the link it came in on, so the table is keyed by
//! both: a client can neither abort another's request nor collide with it.

use std::collections::{BTreeMap, HashMap};

use pawl_shared::clock::Stamp;
use pawl_shared::protocol::RequestId;
use pawl_shared::transport::ClientId;

use crate::step::RequestKey;

/// A request between its ADD and its end.
#[derive(Clone, Debug)]
pub(super) struct LiveRequest {
    pub client: ClientId,
    pub id: RequestId,
    pub added: Stamp,
    /// When its last output came; when it was added, before.
    pub moved: Stamp,
    pub prompt_tokens: usize,
    pub output_tokens: usize,
}

/// Every live request, by key and by `(client, wire id)`; the two views always agree.
#[derive(Debug, Default)]
pub(super) struct RequestTable {
    last_key: u64,
    by_key: BTreeMap<RequestKey, LiveRequest>,
    by_id: HashMap<(ClientId, RequestId), RequestKey>,
}

impl RequestTable {
    pub fn len(&self) -> usize {
        self.by_key.len()
    }

    pub fn is_empty(&self) -> bool {
        self.by_key.is_empty()
    }

    /// Every request, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = (RequestKey, &LiveRequest)> {
        self.by_key.iter().map(|(key, request)| (*key, request))
    }

    /// For each client, how many of its requests run by `running`, and how many do not.
    pub fn count_by_client(
        &self,
        running: impl Fn(RequestKey) -> bool,
    ) -> BTreeMap<ClientId, (u64, u64)> {
        let mut counts = BTreeMap::<ClientId, (u64, u64)>::new();
        for (key, request) in self.iter() {
            let (runs, waits) = counts.entry(request.client).or_default();
            *(if running(key) { runs } else { waits }) += 1;
        }
        counts
    }

    pub fn find(&self, client: ClientId, id: &RequestId) -> Option<RequestKey> {
        self.by_id.get(&(client, id.clone())).copied()
    }

    /// A key that no request had before.
    pub fn fresh_key(&mut self) -> RequestKey {
        self.last_key += 1;
        RequestKey(self.last_key)
    }

    pub fn insert(&mut self, key: RequestKey, request: LiveRequest) {
        let id = (request.client, request.id.clone());
        let older = self.by_id.insert(id, key);
        assert!(older.is_none(), "request {} was inserted twice", request.id);
        self.by_key.insert(key, request);
    }

    pub fn get_mut(&mut self, key: RequestKey) -> Option<&mut LiveRequest> {
        self.by_key.get_mut(&key)
    }

    pub fn remove(&mut self, key: RequestKey) -> Option<LiveRequest> {
        let request = self.by_key.remove(&key)?;
        let named = self.by_id.remove(&(request.client, request.id.clone()));
        assert_eq!(named, Some(key), "request {} was named twice", request.id);
        Some(request)
    }

    /// Removes and returns every request of `client`, oldest first.
    pub fn remove_client(&mut self, client: ClientId) -> Vec<(RequestKey, LiveRequest)> {
        let keys: Vec<_> =
            self.by_key.iter().filter(|(_, r)| r.client == client).map(|(&k, _)| k).collect();
        keys.into_iter().filter_map(|key| self.remove(key).map(|r| (key, r))).collect()
    }

    /// Removes and returns every request, oldest first.
    pub fn remove_all(&mut self) -> Vec<(RequestKey, LiveRequest)> {
        self.by_id.clear();
        std::mem::take(&mut self.by_key).into_iter().collect()
    }
}
