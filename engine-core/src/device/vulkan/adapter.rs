//! What an adapter offers, and what is made of it: pure functions over numbers, so that a test can
//! mask an offer.

use std::fmt;

/// What kind of device an adapter is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdapterKind {
    /// A GPU with its own memory.
    Discrete,
    /// A GPU that shares the processor's memory.
    Integrated,
    /// A GPU passed into a virtual machine.
    Virtual,
    /// Software on the processor.
    Software,
    /// The driver does not say.
    Unknown,
}

impl AdapterKind {
    /// Whether `auto` may take it: software is slower than the CPU device.
    #[must_use]
    pub fn is_gpu(self) -> bool {
        matches!(self, Self::Discrete | Self::Integrated | Self::Virtual)
    }
}

impl fmt::Display for AdapterKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Discrete => "discrete GPU",
            Self::Integrated => "integrated GPU",
            Self::Virtual => "virtual GPU",
            Self::Software => "software",
            Self::Unknown => "unknown kind",
        })
    }
}

/// Limits and features of an adapter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// For people.
    pub name: String,
    /// For people.
    pub driver: String,
    /// Of device.
    pub kind: AdapterKind,
    /// Bytes of its largest own heap of memory.
    pub memory_bytes: u64,
    /// Bytes of a buffer that a kernel can see at once.
    pub binding_bytes: u64,
    /// Bytes of a buffer.
    pub buffer_bytes: u64,
    /// Invocations of a workgroup.
    pub invocations: u32,
    /// Bytes that a workgroup shares.
    pub workgroup_bytes: u32,
    /// Storage buffers of a kernel.
    pub storage_buffers: u32,
    /// Invocations of a subgroup, least and most, where kernels may use them.
    pub subgroup: Option<(u32, u32)>,
    /// Time stamps of the device.
    pub timestamps: bool,
    /// Compiled pipelines can be kept.
    pub pipeline_cache: bool,
}

/// What the kernels need; every WebGPU device has it.
const INVOCATIONS: u32 = 256;
const WORKGROUP_BYTES: u32 = 16 << 10;
const STORAGE_BUFFERS: u32 = 6;

/// How kernels run on an adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Path {
    /// Parts that the columns of a matrix are split into: more threads for one row, but on a
    /// processor threads are what there is too much of.
    pub segments: u32,
    /// Kernels of `shaders/subgroup/`.
    pub subgroups: bool,
    /// Rows of one submission. A watchdog, or the wait for a sign of life, bounds its time.
    pub tokens_max: usize,
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { segments, subgroups, tokens_max } = self;
        let subgroups = if *subgroups { "with subgroups" } else { "without subgroups" };
        write!(f, "{subgroups}, {segments} segments, {tokens_max} rows a submission")
    }
}

impl Offer {
    /// Why no model can run on it.
    #[must_use]
    pub fn refusal(&self) -> Option<String> {
        for (what, found, need) in [
            ("invocations of a workgroup", self.invocations, INVOCATIONS),
            ("bytes of a workgroup", self.workgroup_bytes, WORKGROUP_BYTES),
            ("storage buffers of a kernel", self.storage_buffers, STORAGE_BUFFERS),
        ] {
            if found < need {
                return Some(format!("it has {found} {what}, the kernels need {need}"));
            }
        }
        None
    }

    /// The kernels that run on it.
    #[must_use]
    pub fn path(&self) -> Path {
        // Eight neighbours load the eight vectors of a row's block for one another, so all of a
        // subgroup must be at the same block: with one segment they are.
        let subgroups = self.subgroup.is_some_and(|(least, _)| least >= 8);
        match self.kind {
            AdapterKind::Software => Path { segments: 1, subgroups, tokens_max: 32 },
            _ => Path { segments: 8, subgroups: false, tokens_max: 512 },
        }
    }
}

/// Which adapter is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// A GPU, if there is one.
    Gpu,
    /// The best there is: a GPU before software.
    Best,
    /// This one of the list.
    Index(usize),
}

/// The index of the adapter to take.
///
/// # Errors
/// Why none is taken, and what there is.
pub fn choose(offers: &[Offer], wanted: Wanted) -> Result<usize, String> {
    if offers.is_empty() {
        return Err("no Vulkan adapter is there: install a Vulkan driver, or choose --device cpu"
            .to_owned());
    }
    if let Wanted::Index(index) = wanted {
        let Some(offer) = offers.get(index) else {
            let last = offers.len() - 1;
            return Err(format!(
                "there is no adapter {index}: choose --device vulkan:0 to vulkan:{last} (pawl \
                 doctor lists them)"
            ));
        };
        return match offer.refusal() {
            None => Ok(index),
            Some(reason) => Err(format!("adapter {index} ({}) is refused: {reason}", offer.name)),
        };
    }
    let rank = |offer: &Offer| match offer.kind {
        AdapterKind::Discrete => 0,
        AdapterKind::Virtual => 1,
        AdapterKind::Integrated => 2,
        AdapterKind::Unknown => 3,
        AdapterKind::Software => 4,
    };
    let usable = |offer: &Offer| {
        offer.refusal().is_none() && (wanted == Wanted::Best || offer.kind.is_gpu())
    };
    let usable = offers.iter().enumerate().filter(|(_, offer)| usable(offer));
    usable.min_by_key(|(_, offer)| rank(offer)).map(|(index, _)| index).ok_or_else(|| {
        let each = |(index, offer): (usize, &Offer)| {
            let why = offer.refusal().unwrap_or_else(|| format!("it is {}", offer.kind));
            format!("{index} ({}): {why}", offer.name)
        };
        let each: Vec<_> = offers.iter().enumerate().map(each).collect();
        format!("no adapter will do: {}", each.join("; "))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(name: &str, kind: AdapterKind) -> Offer {
        Offer {
            name: name.to_owned(),
            driver: "test".to_owned(),
            kind,
            memory_bytes: 8 << 30,
            binding_bytes: 128 << 20,
            buffer_bytes: 256 << 20,
            invocations: 256,
            workgroup_bytes: 16 << 10,
            storage_buffers: 8,
            subgroup: Some((8, 8)),
            timestamps: false,
            pipeline_cache: false,
        }
    }

    #[test]
    fn a_gpu_is_chosen_before_software_and_auto_takes_no_software() {
        let software = offer("soft", AdapterKind::Software);
        let integrated = offer("small", AdapterKind::Integrated);
        let discrete = offer("large", AdapterKind::Discrete);
        let weak = Offer { invocations: 128, ..offer("weak", AdapterKind::Discrete) };
        let all = [software.clone(), integrated, weak.clone(), discrete];
        let told = [
            format!("{:?}", choose(&all, Wanted::Gpu)),
            format!("{:?}", choose(&all, Wanted::Best)),
            format!("{:?}", choose(&all[..1], Wanted::Best)),
            format!("{:?}", choose(&[software, weak], Wanted::Gpu)),
            format!("{:?}", choose(&[], Wanted::Best)),
            format!("{:?}", choose(&all, Wanted::Index(2))),
            format!("{:?}", choose(&all, Wanted::Index(4))),
            format!("{:?}", choose(&all, Wanted::Index(0))),
        ];
        insta::assert_snapshot!(told.join("\n"));
    }

    #[test]
    fn the_path_follows_from_limits_and_features() {
        let software = offer("soft", AdapterKind::Software);
        let without = Offer { subgroup: None, ..software.clone() };
        let narrow = Offer { subgroup: Some((4, 64)), ..software.clone() };
        let gpu = offer("large", AdapterKind::Discrete);
        let told = [software, without, narrow, gpu].map(|offer| offer.path().to_string());
        insta::assert_snapshot!(told.join("\n"));
    }
}
