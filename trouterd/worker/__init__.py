"""One model's process: scheduler, decode loop, client and peer loops."""
