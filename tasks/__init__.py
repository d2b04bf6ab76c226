"""The stages of an iteration. Data goes one way: config → generate → carry_over → train; no stage imports another."""
