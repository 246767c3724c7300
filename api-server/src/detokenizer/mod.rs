//! Token ids to text, piece by piece.
