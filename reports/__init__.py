"""What people read: tables, figures and the page. Reads storage alone, never the engine."""
