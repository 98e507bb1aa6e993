"""Fields that entities take along on planned moves."""
