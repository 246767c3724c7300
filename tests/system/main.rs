//! The running system from outside: the shipped processes, through their real sockets.

mod batch;
mod counting;
mod frames;
mod harness;
mod identity;
mod python;
mod weights;
