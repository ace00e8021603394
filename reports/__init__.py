"""qlora-sweep: what people read. Tables, figures and the page; reads storage, never the engine."""
