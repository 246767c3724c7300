//! Scenarios on a clock that stands still unless it is moved.
