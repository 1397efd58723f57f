"""What makes a step fast and keeps packed samples apart. Needs torch and transformers only."""
