//! The scheduler driven from outside: scenario files with traces, and a seeded simulation.

mod bounds;
mod fake_runner;
mod scenario;
mod simulation;
mod world;
