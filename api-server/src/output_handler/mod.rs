//! Folds the frames of the core: the state of every open request, and what is counted.
