"""What has left the window of a stream: tiers, blocks and recall."""
