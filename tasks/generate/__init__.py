"""Generate: sample responses under the current policy until a cut, and write every trajectory as it stands."""
