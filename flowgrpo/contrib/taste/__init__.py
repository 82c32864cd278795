"""A person's own taste in the loop: votes between the updates of a few-step model, and a head that learns from them."""
