//! What every picture of the lab is made of: an SVG that needs nothing else, its
//! fonts, and the colour of each setup. Pure; what is drawn is `picture.rs`'s
//! and `bench/plot.rs`'s business.

use crate::stage::Setup;

/// An SVG that is being written. Text classes: `h` heading, `s` below it, `t`
/// title of a panel, `n` note, `l` label, `v` value; with `e`, ending at x.
pub(crate) struct Drawing {
    out: String,
}

/// The same in all pictures.
pub(crate) const fn colour(setup: Setup) -> &'static str {
    match setup {
        Setup::DramOnly => "#64748b",
        Setup::Zram { .. } => "#d97706",
        Setup::Zswap { .. } => "#9333ea",
        Setup::Memtierd { .. } => "#2563eb",
        Setup::Strata { .. } => "#0d9488",
    }
}

/// Text that may stand between tags.
pub(crate) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

impl Drawing {
    /// An empty white sheet.
    pub(crate) fn new(width: f64, height: f64) -> Self {
        let mut drawing = Self { out: String::new() };
        drawing.put(&format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" \
             width=\"{width:.0}\" height=\"{height:.0}\" font-family=\"Inter, 'Segoe UI', \
             'DejaVu Sans', sans-serif\">\n<style>.h{{font-size:27px;font-weight:700;\
             fill:#0f172a}}.s{{font-size:14px;fill:#475569}}\
             .t{{font-size:15px;font-weight:700;fill:#0f172a}}.n{{font-size:11px;fill:#64748b}}\
             .l{{font-size:14px;font-weight:600;fill:#0f172a}}\
             .v{{font-size:13px;font-weight:600;fill:#0f172a}}.e{{text-anchor:end}}</style>"
        ));
        drawing
            .put(&format!("<rect width=\"{width:.0}\" height=\"{height:.0}\" fill=\"#ffffff\"/>"));
        drawing
    }

    pub(crate) fn text(&mut self, x: f64, y: f64, class: &str, text: &str) {
        let text = escape(text);
        self.put(&format!("<text x=\"{x:.1}\" y=\"{y:.1}\" class=\"{class}\">{text}</text>"));
    }

    /// A straight line with a stroke.
    pub(crate) fn line(&mut self, from: (f64, f64), to: (f64, f64), stroke: &str, width: f64) {
        self.put(&format!(
            "<line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" stroke=\"{stroke}\" \
             stroke-width=\"{width}\"/>",
            from.0, from.1, to.0, to.1
        ));
    }

    /// An element as it is.
    pub(crate) fn put(&mut self, element: &str) {
        self.out.push_str(element);
        self.out.push('\n');
    }

    pub(crate) fn finish(mut self) -> String {
        self.put("</svg>");
        self.out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_cannot_break_the_picture() {
        assert_eq!(escape("a<b & \"c\">"), "a&lt;b &amp; &quot;c&quot;&gt;");
    }
}
