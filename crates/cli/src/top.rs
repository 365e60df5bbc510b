//! `strata top`: the tenants, live. What is shown is worked out in `top/model.rs`
//! and drawn in `top/draw.rs`; here are the loop, the keys and the terminal.
//!
//! Daemons are asked on a thread of its own, so that a slow one does not make the
//! keys slow.

mod draw;
mod model;

use std::io::IsTerminal;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use crate::client;
use crate::failure::{Failure, Result};
use model::{Model, Sample};

/// How long the loop waits for a key before it looks for news.
const KEY_POLL: Duration = Duration::from_millis(50);

/// Shows the tenants until q is pressed; with `once`, prints one frame.
pub(crate) fn top(once: bool, interval: Duration) -> Result<()> {
    if once {
        return crate::print(&one_frame(interval)?);
    }
    if !std::io::stdout().is_terminal() {
        return Err(Failure::new("cannot show top", "the output is not a terminal")
            .todo("strata top --once prints one frame as text"));
    }
    let first = look()?;
    let samples = look_repeatedly(interval)?;
    let failed = |error| Failure::new("cannot draw on the terminal", error);
    let mut terminal = ratatui::try_init().map_err(failed)?;
    let shown = show(&mut terminal, first, &samples);
    // Whatever happened, the terminal is the user's again.
    ratatui::restore();
    shown.map_err(failed)
}

/// Rates need two looks, so one frame takes an interval.
fn one_frame(interval: Duration) -> Result<String> {
    let mut model = Model::default();
    model.add(look()?);
    std::thread::sleep(interval);
    model.add(look()?);
    Ok(model.as_text())
}

fn look() -> Result<Sample> {
    // No daemon, no tenants; one may be started while we look.
    let tenants = client::list_all()?.unwrap_or_default();
    Ok(Sample { at: Instant::now(), tenants })
}

type Look = Result<Sample>;

fn look_repeatedly(interval: Duration) -> Result<Receiver<Look>> {
    // One that nobody has taken yet is enough: the next look waits for it.
    let (sender, receiver): (SyncSender<Look>, Receiver<Look>) = sync_channel(1);
    let looking = move || {
        loop {
            std::thread::sleep(interval);
            // The receiver is gone: so is the reason to look.
            if sender.send(look()).is_err() {
                return;
            }
        }
    };
    std::thread::Builder::new()
        .name("look".into())
        .spawn(looking)
        .map_err(|error| Failure::new("cannot show top", error))?;
    Ok(receiver)
}

fn show(
    terminal: &mut ratatui::DefaultTerminal,
    first: Sample,
    samples: &Receiver<Look>,
) -> std::io::Result<()> {
    let mut model = Model::default();
    model.add(first);
    let mut changed = true;
    loop {
        if changed {
            terminal.draw(|frame| draw::draw(frame, &mut model))?;
        }
        changed = false;
        if event::poll(KEY_POLL)? {
            match event::read()? {
                Event::Key(key) if key.kind != KeyEventKind::Release => {
                    if !press(&mut model, key) {
                        return Ok(());
                    }
                    changed = true;
                }
                Event::Resize(..) => changed = true,
                _ => {}
            }
        }
        match samples.recv_timeout(Duration::ZERO) {
            Ok(Ok(sample)) => {
                model.add(sample);
                changed = true;
            }
            Ok(Err(failure)) => {
                model.set_problem(failure.to_string());
                changed = true;
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                return Err(std::io::Error::other("the thread that asks stratad is gone"));
            }
        }
    }
}

/// What a key does; false: quit.
fn press(model: &mut Model, key: KeyEvent) -> bool {
    match key.code {
        KeyCode::Char('q') | KeyCode::Esc => return false,
        KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return false,
        KeyCode::Left | KeyCode::Char('<') => model.sort_by_previous_column(),
        KeyCode::Right | KeyCode::Char('>') => model.sort_by_next_column(),
        KeyCode::Char('r') => model.reverse(),
        KeyCode::Up | KeyCode::Char('k') => model.select_previous(),
        KeyCode::Down | KeyCode::Char('j') => model.select_next(),
        _ => {}
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::stats;

    #[test]
    fn keys() {
        let mut model = Model::default();
        model.add(Sample { at: Instant::now(), tenants: vec![stats("a"), stats("b")] });
        let mut type_key = |code: KeyCode| press(&mut model, KeyEvent::from(code));
        assert!(
            type_key(KeyCode::Right) && type_key(KeyCode::Char('r')) && type_key(KeyCode::Down)
        );
        assert!(type_key(KeyCode::Char('x')));
        assert!(!type_key(KeyCode::Char('q')));
        assert!(!type_key(KeyCode::Esc));
        assert!(type_key(KeyCode::Char('c')));
        let control_c = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        assert!(!press(&mut model, control_c));
    }
}
