"""KestRL's learner: ledger, dispatcher, batch, loss, step, publish."""
