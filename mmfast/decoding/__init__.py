"""Draft and verify: schedules, the rules of acceptance, and the loop that runs them."""
