"""What a run tells while it trains: `metrics` for programs, `console` for a person."""
