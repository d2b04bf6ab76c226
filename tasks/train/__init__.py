"""Train: DAPO updates of the policy with FSDP, on one rank or many."""
