mod harness;
mod refusals;
mod steps;
mod utilities;
