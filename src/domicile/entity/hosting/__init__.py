"""What happens to a message at its owner? The entities, mailboxes and turns of the shards at home
in this process."""
