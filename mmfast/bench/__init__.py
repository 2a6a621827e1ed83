"""Speed on real model shapes, result rows and the tables made from them."""
