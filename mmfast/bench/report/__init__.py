"""Tables, charts and pages made from the rows in assets/results."""
