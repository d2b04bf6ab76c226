"""The sandbox: a small reasoning task with checkable answers, its data and its pre-trained model, for a laptop."""
