//! The running system from outside: the shipped processes, through their real sockets.

// Everything here is a test; clippy sees only functions marked as one.
#![allow(clippy::unwrap_used)]

mod admission;
mod awaiting;
mod batch;
mod bench;
mod clocks;
mod counting;
mod crowds;
mod deploying;
mod doctor;
mod exposition;
mod fleet;
mod frames;
mod grpc;
mod harness;
mod hostile;
mod identity;
mod joining;
mod ledger;
mod lifecycle;
mod model;
mod operators;
mod prometheus;
mod python;
mod recording;
mod scraping;
mod streams;
mod vulkan;
mod weights;
