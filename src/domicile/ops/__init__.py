"""What do operators use? The command line and what it shows. Nothing else imports it."""
